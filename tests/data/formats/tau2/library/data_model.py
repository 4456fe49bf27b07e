"""Data of the library domain, in the shape of tau2-bench."""

from typing import Dict, List, Literal, Optional

from pydantic import BaseModel, Field
from tau2.environment.db import DB

LoanStatus = Literal["open", "returned", "overdue"]


class Book(BaseModel):
    """A title."""

    book_id: str = Field(description="Unique identifier of the book")
    title: str
    copies: int = Field(description="Copies on the shelf", ge=0)
    tags: List[str] = Field(default_factory=list)


class Loan(BaseModel):
    loan_id: str
    book_id: str
    status: LoanStatus
    fee: float = 0.0
    note: Optional[str] = None


class Member(BaseModel):
    member_id: str
    name: str
    loans: Dict[str, Loan] = Field(description="Loans by id")


class LibraryDB(DB):
    """The whole data base."""

    books: Dict[str, Book] = Field(description="Books by id")
    members: Dict[str, Member]
