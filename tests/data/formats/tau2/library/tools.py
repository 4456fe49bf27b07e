"""Tools of the library domain, in the shape of tau2-bench."""

from typing import Any, Dict, List

from loguru import logger
from tau2.domains.library.data_model import Book, LibraryDB, Loan, Member
from tau2.domains.library.utils import LIBRARY_DB_PATH
from tau2.environment.toolkit import ToolKitBase, ToolType, is_tool


class LibraryTools(ToolKitBase):
    """All the tools of the desk."""

    db: LibraryDB

    def __init__(self, db: LibraryDB) -> None:
        super().__init__(db)

    def _member(self, member_id: str) -> Member:
        if member_id not in self.db.members:
            raise ValueError("Member not found")
        return self.db.members[member_id]

    def _book(self, book_id: str) -> Book:
        if book_id not in self.db.books:
            raise ValueError("Book not found")
        return self.db.books[book_id]

    @is_tool(ToolType.GENERIC)
    def calculate(self, expression: str) -> str:
        """Add numbers, such as '1 + 2.5'.

        Args:
            expression: Numbers joined by plus signs.
        """
        return str(round(sum(float(part) for part in expression.split("+")), 2))

    @is_tool(ToolType.READ)
    def get_member(self, member_id: str) -> Member:
        """Everything about a member.

        Args:
            member_id: The member's id, such as 'm1'.

        Raises:
            ValueError: If there is no such member.
        """
        return self._member(member_id)

    @is_tool(ToolType.READ)
    def find_books(self, tag: str) -> List[Book]:
        """Books with a tag."""
        return [book for book in self.db.books.values() if tag in book.tags]

    @is_tool(ToolType.WRITE)
    def return_loan(self, member_id: str, loan_id: str) -> Loan:
        """Take a book back; its copy is on the shelf again."""
        loan = self._member(member_id).loans.get(loan_id)
        if loan is None or loan.status == "returned":
            raise ValueError("No open loan with this id")
        loan.status = "returned"
        self._book(loan.book_id).copies += 1
        logger.debug(f"returned {loan_id}")
        return loan

    @is_tool(ToolType.WRITE)
    def lend_book(self, member_id: str, book_id: str, days: int = 28) -> Dict[str, Any]:
        """Lend a copy."""
        member, book = self._member(member_id), self._book(book_id)
        if book.copies < 1:
            raise ValueError("No copy left")
        book.copies -= 1
        loan = Loan(loan_id=f"l{len(member.loans) + 1}", book_id=book_id, status="open")
        member.loans[loan.loan_id] = loan
        return {"loan": loan, "days": days}

    def set_copies(self, book_id: str, copies: int) -> None:
        """Only for a task's initial state."""
        self._book(book_id).copies = copies

    def assert_copies(self, book_id: str, expected: int) -> bool:
        """Only for a task's assertions."""
        return self._book(book_id).copies == expected


if __name__ == "__main__":
    print(LibraryTools(LibraryDB.load(LIBRARY_DB_PATH)).get_statistics())
