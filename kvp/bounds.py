"""Types of numbers with bounds, for flags and for options of methods."""

from typing import Annotated

from annotated_types import Ge, Le

Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]
Weight = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
