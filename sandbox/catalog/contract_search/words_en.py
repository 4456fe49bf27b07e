"""English contract text: boilerplate, penalties under many names, and what looks alike."""

from __future__ import annotations

SUPPLIER, CUSTOMER = "the Supplier", "the Customer"

TOPICS: dict[str, tuple[str, ...]] = {
    "Scope of work": (
        "{a} performs the services that Annex {n} describes and keeps its documentation current.",
        "Work that the Annex does not name is agreed in writing before it begins.",
        "{a} may use subcontractors after it has told {b} their names {days} days before.",
        "Each work package ends with a written note of completion signed by both project leads.",
        "Changes to the scope follow the change procedure and never a spoken arrangement.",
    ),
    "Delivery": (
        "Goods are delivered to the site named in the order during business hours.",
        "{a} announces each delivery {days} days before it leaves the warehouse.",
        "Packaging must protect the goods against moisture, shock and dust during transport.",
        "Title passes when the delivery note is signed; risk passes when the goods are unloaded.",
        "Part deliveries are allowed where the order says so and are invoiced one by one.",
    ),
    "Acceptance": (
        "{b} examines each delivery within {days} days and reports what it finds in writing.",
        "Acceptance tests follow the test plan; a test that cannot be repeated does not count.",
        "Minor defects do not prevent acceptance but are listed and removed without delay.",
        "Use of the goods in daily operation for {days} days counts as acceptance.",
        "The parties appoint one expert each when they disagree about the outcome of a test.",
    ),
    "Prices and payment": (
        "Prices are fixed for {n} months and then follow the published index of the sector.",
        "Invoices are due {days} days after receipt and name the order and the cost centre.",
        "Travel is refunded at cost when it was approved before the journey.",
        "Set-off is possible only with claims that are undisputed or decided by a court.",
        "Bank charges are carried by the party whose bank demands them.",
    ),
    "Confidentiality": (
        "Both parties keep secret what they learn about the other's business.",
        "Information that was public before, or became public without fault, is not confidential.",
        "Documents are returned or destroyed within {days} days after the end of the contract.",
        "Staff are bound in writing to the same duty before they get access.",
        "The duty of secrecy outlasts the contract by {n} months.",
    ),
    "Data protection": (
        "Personal data is processed only on documented instructions of {b}.",
        "{a} keeps a record of processing and shows it on request within {days} days.",
        "Access is granted by role and reviewed every {n} months.",
        "Backups are encrypted and kept in a separate fire compartment.",
        "Transfers to other countries need the consent of {b} and an adequate level of protection.",
    ),
    "Quality": (
        "{a} runs a quality system that is certified by an accredited body.",
        "Audits are announced {days} days before and take place during business hours.",
        "Samples of each batch are kept for {n} months.",
        "Deviations are recorded, analysed and answered with corrective action.",
        "Measuring equipment is calibrated every {n} months by a recognised laboratory.",
    ),
    "Support": (
        "The service desk answers in English and German on working days from 8:00 to 18:00.",
        "Requests are classified in {n} levels; the caller proposes, the desk decides.",
        "Planned maintenance is announced {days} days before and done at the weekend.",
        "{a} keeps spare parts in stock for {n} months after the last delivery.",
        "A monthly report lists all requests, their causes and the time they took.",
    ),
    "Personnel": (
        "{a} employs staff with the training that their task requires.",
        "Key persons are replaced only for good cause and after {days} days of handover.",
        "Staff on site follow the house rules and wear a visible badge.",
        "The right to give instructions to its staff stays with each party.",
        "Working hours follow the law of the place of work.",
    ),
    "Term and termination": (
        "The contract runs for {n} months and is prolonged by twelve unless a party gives notice.",
        "Notice is given in writing {days} days before the end of a quarter.",
        "Each party may end the contract for good cause after an unheeded reminder.",
        "After the end {a} helps to move the service to a successor for {n} months.",
        "Orders that were placed before the end are completed under this contract.",
    ),
    "Force majeure": (
        "Events that nobody could foresee or prevent suspend the duties they make impossible.",
        "The affected party reports the event within {days} days and says how long it may last.",
        "If the event lasts longer than {n} months, either party may leave the contract.",
        "Strikes in a party's own company are no such event.",
        "Duties that are not affected go on as before.",
    ),
    "General provisions": (
        "Changes of this contract need the written form, and so does a waiver of that form.",
        "If a provision is void, the others stay in force.",
        "The annexes are part of the contract; the contract prevails where they differ.",
        "The courts of the place where {b} has its seat are competent.",
        "Notices go to the addresses on the first page and count from the day of receipt.",
    ),
}

BREACHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "late delivery": ("late delivery of goods", (
        "If goods arrive later than agreed, {payer} pays {payee} liquidated damages of {amount} "
        "for each week begun.",
        "For every week by which a delivery is overdue {payee} may deduct {amount} from what it "
        "owes to {payer}.",
    )),
    "late payment": ("late payment of an invoice", (
        "An invoice that is still open after its due date costs {payer} a late fee of {amount}, "
        "owed to {payee}.",
        "Where a payment is overdue, a reminder charge of {amount} falls due from {payer} to "
        "{payee}.",
    )),
    "breach of confidence": ("a breach of confidentiality", (
        "Each disclosure to a third party obliges {payer} to a forfeit of {amount} in favour of "
        "{payee}.",
        "{payer} owes {payee} a conventional fine of {amount} for every breach of the duty of "
        "secrecy.",
    )),
    "poaching": ("hiring staff of the other party", (
        "If {payer} hires staff of {payee} during the term, it compensates {payee} with a lump sum "
        "of {amount} a head.",
        "Hiring away an employee of {payee} is settled by {payer} with an indemnity of {amount}.",
    )),
    "slow support": ("a missed reaction time", (
        "For each missed reaction time {payer} grants {payee} a service credit of {amount}.",
        "A reaction time that is not kept reduces the monthly fee that {payee} owes {payer} by "
        "{amount}.",
    )),
    "early exit": ("leaving the contract early", (
        "When {payer} leaves before the end of the term, it pays {payee} a break fee of {amount}.",
        "An exit before the agreed term is compensated by {payer} with a cancellation charge of "
        "{amount} to {payee}.",
    )),
    "data breach": ("a breach of data protection", (
        "For each case in which personal data is lost, {payer} pays {payee} a penalty of {amount}.",
        "A loss of personal data makes {payer} liable to {payee} for agreed damages of {amount} a "
        "case.",
    )),
    "failed audit": ("a failed audit", (
        "If an audit finds a major deviation, {payer} bears a re-audit surcharge of {amount} "
        "payable to {payee}.",
        "A major finding in an audit is answered by {payer} with a payment of {amount} to {payee}.",
    )),
}  # fmt: skip

DELETED = (
    "(Deleted by amendment no. {n}. The former text, under which {payer} owed {payee} {amount} for "
    "{breach}, no longer applies.)"
)
DECOYS = (
    "The total liability of {payer} is limited to {amount} for each year of the contract.",
    "{payer} keeps an insurance with a cover of at least {amount} for each event.",
    "{payer} leaves a security deposit of {amount} with {payee}, which is returned at the end.",
    "The fee for the yearly training day is {amount} and is owed by {payee}.",
    "Orders below {amount} need no second signature.",
    "Damages, penalties and late fees that this contract does not name are excluded.",
)

QUESTIONS = {
    "payer": "Find every clause in force that makes {payer} pay, credit or lose a fixed sum "
    "because of a breach or an early exit, whatever the contract calls it. Caps, insurance, "
    "deposits, ordinary fees and deleted clauses do not count.",
    "breach": "Which clause in force sets the fixed sum that {payer} pays, credits or loses for "
    "{breach}? Deleted clauses do not count.",
    "frame": "The tools search a long contract. {question} Reply with one line a clause: its "
    "number and the sum in euro, nothing else, for example:\n7.2 15000",
}


def amount_text(amount: int, style: int) -> str:
    """48000 as the contract writes it."""
    return (f"EUR {amount:,}", f"{amount:,} euro", f"€{amount:,}")[style % 3]
