"""Losses: chunked log-probs and entropy, clipped policy loss, KL, importance weights, aggregation, supervised loss.

Every function takes packed columns [T] and the mask of sampled tokens, and puts `torch.where` on its inputs, never a
product on its outputs: a NaN or inf at a token that the policy did not sample reaches neither value nor gradient.
Formulas, sources and gradients: docs/algorithms.md.
"""
