"""Tools of the shop domain, in the shape of tau2-bench."""

from typing import List, Literal

from tau2.environment.toolkit import ToolKitBase, ToolType, is_tool


class ShopTools(ToolKitBase):
    """Tools over the orders."""

    @is_tool(ToolType.READ)
    def get_order(self, order_id: str) -> dict:
        """Details of an order.

        Args:
            order_id: The order.
        """
        return self.db.orders[order_id]

    @is_tool(ToolType.WRITE)
    def cancel_order(
        self, order_id: str, reason: Literal["no longer needed", "ordered by mistake"]
    ) -> dict:
        """Cancel a pending order."""
        raise NotImplementedError

    @is_tool(ToolType.WRITE)
    def note_items(self, items: List[str], urgent: bool = False) -> str:
        """Write items down for the back office."""
        raise NotImplementedError
