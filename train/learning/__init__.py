"""How rankers learn: their first weights, losses, optimiser, validation and calibration."""
