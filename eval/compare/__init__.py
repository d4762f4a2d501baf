"""`kvp compare A B`: two results folders, method by method, paired by prompt."""
