"""The sums of a step's earlier micro-batches, which the last one takes along."""

from __future__ import annotations

from torch import Tensor

from .flat_layout import FlatLayout
from .streams import keep_until_read


class AccumulatedGradient:
    """The accumulated gradient of one unit, in fp32, as far reduced as its gradient scope says.

    It belongs to parameters, of which the next micro-batch may use others; see [Note: Identity] in flat_layout.py.

    Attributes:
        sums: The sums, flat; None if nothing has been accumulated.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self._layout: FlatLayout | None = None

    @property
    def names(self) -> frozenset[str]:
        """The FQNs of its parameters, as far as layouts were given."""
        return frozenset() if self.sums is None or self._layout is None else self._layout.names

    def add(self, part: Tensor, layout: FlatLayout | None) -> None:
        """Add a micro-batch's part, fp32, of whole chunks of ``layout``; it may be kept and written to.

        Of fixed layouts, or none, all parts are alike.
        """
        if layout is not None and layout.is_fixed:
            layout = None
        if self.sums is None:
            self.sums, self._layout = part, layout
            return
        sums = keep_until_read(self.sums)
        if layout is None or self._layout is None or layout == self._layout:
            sums.add_(part)
            return
        both = self._layout | layout
        self.sums = self._layout.translate(sums, both).add_(layout.translate(part, both))
        self._layout = both

    def take(self, layout: FlatLayout | None, divided_by: float = 1.0) -> Tensor | None:
        """Give away the sums in ``layout``, divided; None if there are none.

        Raises:
            ValueError: If ``layout`` lacks a parameter that has accumulated gradients.
        """
        sums, self.sums = self.sums, None
        if sums is None:
            return None
        keep_until_read(sums)
        if layout is not None and self._layout is not None:
            if missing := self._layout.names - layout.names:
                raise ValueError(f"a gradient lacks {sorted(missing)}, whose earlier micro-batches were accumulated")
            sums = self._layout.translate(sums, layout)
        return sums if divided_by == 1.0 else sums.div_(divided_by)
