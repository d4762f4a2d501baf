"""What every registered method costs next to the prefill of the same prompt."""
