"""What every method computes, in float64 NumPy, written from the papers' formulas.

Nothing here imports the product's methods or its maths; `inputs` alone builds the product's views,
so that both sides read the same numbers.
"""
