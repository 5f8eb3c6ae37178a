"""The report page: one HTML file that shows what the run folders of one or several runs hold. No torch."""
