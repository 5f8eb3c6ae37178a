"""Advantages: one estimator a file; which groups carry a signal; from a number a sample to a column.

`expand` alone imports torch, so that the driver and the reward processes can import the rest.
"""
