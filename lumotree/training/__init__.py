"""How the shipped model was made: text, parallel form of the model's arithmetic, optimisation, evaluation.

Run as `python -m lumotree.training`. Nothing else in `lumotree` imports this package.
"""
