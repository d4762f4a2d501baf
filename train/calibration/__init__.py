"""`kvp calibrate`: policy directory + trace store -> the same policy with comparable heads."""
