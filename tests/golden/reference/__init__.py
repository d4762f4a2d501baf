"""What every method computes, in float64 NumPy, written from the papers' formulas.

Nothing here imports the product's methods or maths; `inputs` builds the views of both sides.
"""
