"""Words of a statement and of the questions about it, in English and Chinese."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Words:
    """Labels of the page, names to draw from, and question templates."""

    title: str
    statement: str
    holder: str
    account: str
    period: str
    pages: str
    page: str
    currency: str
    opening: str
    closing: str
    date: str
    text: str
    incoming: str
    outgoing: str
    holders: tuple[str, ...]
    parties: tuple[str, ...]
    twins: tuple[tuple[str, str], ...]
    """Names that contain each other or look alike."""
    references: tuple[str, ...]
    questions: dict[str, str]
    frame: str
    """The instruction around a question."""


WORDS = {
    "en": Words(
        title="Account statement",
        statement="Statement for",
        holder="Account holder",
        account="Account number",
        period="Period",
        pages="Pages",
        page="Page",
        currency="All amounts in euro",
        opening="Opening balance",
        closing="Closing balance",
        date="Date",
        text="Text",
        incoming="Money in",
        outgoing="Money out",
        holders=(
            "Harbour Bakery Ltd", "Pine Street Dental", "Orchard Bikes GmbH", "Lake View Hostel",
            "Quill Printing Co", "Maple Garden Centre",
        ),
        parties=(
            "City Power", "Delta Insurance", "Green Grocer Union", "Rapid Couriers",
            "Summit Software", "Tax Office West", "Union Telecom", "Valley Water",
            "Westgate Property", "Zenith Foods", "Baker & Sons", "Copper Kettle Ltd",
        ),
        twins=(
            ("Northwind", "Northwind Logistics"), ("Miller AG", "Mueller AG"),
            ("Atlas Paper", "Atlas Paper Export"), ("Stone Ltd", "Stone & Ltd Partners"),
            ("Blue Harbor Cafe", "Blue Harbour Cafe"),
        ),
        references=(
            "invoice", "monthly fee", "refund", "deposit", "order", "service", "rent", "licence",
        ),
        questions={
            "party_out": "How much went out to {party} in total, from {first} to {last}?",
            "party_in": "How much came in from {party} in total, from {first} to {last}?",
            "party_net": "How much more went out to {party} than came in from it, from {first} to "
            "{last}? (Negative if more came in.)",
            "net_flow": "By how much does all money in exceed all money out, from {first} to "
            "{last}? (Negative if it does not.)",
            "largest": "What is the sum of the largest single outgoing amount of each month, from "
            "{first} to {last}?",
        },
        frame="statement.pdf is a bank statement, one page a month. {question} Names must match "
        "exactly. Reply with the amount only, with two decimals, for example 1234.56.",
    ),
    "zh": Words(
        title="银行账户对账单",
        statement="对账单月份",
        holder="户名",
        account="账号",
        period="期间",
        pages="页数",
        page="页码",
        currency="金额单位：元",
        opening="期初余额",
        closing="期末余额",
        date="日期",
        text="摘要",
        incoming="收入",
        outgoing="支出",
        holders=(
            "海港烘焙有限公司", "松林口腔诊所", "果园自行车行", "湖景青年旅舍", "羽笔印务公司",
            "枫叶园艺中心",
        ),
        parties=(
            "城市电力公司", "德尔塔保险", "绿源蔬菜合作社", "迅达快递", "顶峰软件", "西区税务局",
            "联合电信", "河谷自来水", "西门物业", "天顶食品", "贝克父子商行", "铜壶餐饮",
        ),
        twins=(
            ("北风贸易", "北风贸易物流"), ("宏远实业", "鸿远实业"), ("华安纸业", "华安纸业出口部"),
            ("金石科技", "金石科技服务"), ("蓝港咖啡", "兰港咖啡"),
        ),
        references=("货款", "月费", "退款", "押金", "订单", "服务费", "租金", "许可费"),
        questions={
            "party_out": "从{first}到{last}，一共向“{party}”支出了多少元？",
            "party_in": "从{first}到{last}，一共从“{party}”收入了多少元？",
            "party_net": "从{first}到{last}，向“{party}”的支出合计减去从它的收入合计是多少元？"
            "（收入更多则为负数）",
            "net_flow": "从{first}到{last}，全部收入合计减去全部支出合计是多少元？"
            "（支出更多则为负数）",
            "largest": "从{first}到{last}，每个月最大的一笔支出相加是多少元？",
        },
        frame="statement.pdf 是一份银行对账单，每月一页。{question}名称必须完全一致。"
        "只回答金额，保留两位小数，例如 1234.56。",
    ),
}  # fmt: skip
