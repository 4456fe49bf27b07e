"""WeatherApi: readings from a real HTTP service that behaves like real APIs do.

It pages its lists, refuses calls for a while (429 and 503 with Retry-After), fails (500), is slow,
has a dead version 1, answers 400 and 404 with reasons, and names the same thing differently from
station to station: city/temperature, 城市/温度, an envelope around it, Celsius or Fahrenheit.
Budget unit: the calls of a direct solution, with its retries.
"""

from __future__ import annotations

from typing import Any

from sandbox.catalog.draws import Draws
from sandbox.catalog.generated import Accepts, Call, Drawn, GeneratedFamily

KINDS = ("warmest", "coldest", "difference", "mean")
FAULTS = ("429", "503", "500", "slow")
PAGE_SIZE = 3
REGIONS = {
    "en": {
        "coast": ("Port Ellery", "Saltmarsh", "Gull Point", "Westhaven", "Lantern Bay", "Dunmore"),
        "highlands": ("Cairn", "Pinecrest", "Stonegate", "Falcon Ridge", "Upper Glen", "Tarnside"),
        "valley": ("Millbrook", "Orchardton", "Two Rivers", "Greenford", "Lower Ash", "Fenwick"),
    },
    "zh": {
        "沿海": ("海宁港", "白沙湾", "东屿", "临潮镇", "南渡口", "望海角"),
        "高原": ("云岭", "石门关", "雪松坪", "鹰嘴崖", "上谷", "寒潭"),
        "盆地": ("双溪", "果园镇", "青禾", "麦浪", "下河", "竹里"),
    },
}  # fmt: skip
KEYS = (
    {"name": "city", "date": "date", "temperature": "temperature", "unit": "unit",
     "humidity": "humidity", "envelope": ""},
    {"name": "城市", "date": "日期", "temperature": "温度", "unit": "单位", "humidity": "湿度",
     "envelope": ""},
    {"name": "stationName", "date": "observedOn", "temperature": "tempValue", "unit": "tempUnit",
     "humidity": "relHumidity", "envelope": "data"},
    {"name": "location_name", "date": "obs_date", "temperature": "t", "unit": "u",
     "humidity": "rh", "envelope": "observation"},
)  # fmt: skip
UNITS = {"C": ("C", "celsius", "摄氏度"), "F": ("F", "fahrenheit", "华氏度")}
QUESTIONS = {
    "en": {
        "warmest": "Which station of the region {region} was the warmest on {date}, and how warm "
        "was it there?",
        "coldest": "Which station of the region {region} was the coldest on {date}, and how warm "
        "was it there?",
        "difference": "In the region {region}, by how many degrees was {first} warmer than "
        "{second} on {date}? (Negative if it was colder.)",
        "mean": "What was the mean temperature of {first} and {second} in the region {region} on "
        "{date}?",
        "frame": "A weather service answers http_get; its documentation is at /v2/docs. It may "
        "refuse or fail for a while: then try again. ",
        "number": " Reply with the number only, in degrees Celsius with one decimal, for example "
        "12.3.",
        "named": " Reply with the station's name and the number only, in degrees Celsius with one "
        "decimal, for example: Cairn 12.3",
    },
    "zh": {
        "warmest": "{date}，“{region}”区域内哪个站点气温最高？是多少度？",
        "coldest": "{date}，“{region}”区域内哪个站点气温最低？是多少度？",
        "difference": "{date}，在“{region}”区域内，"
        "{first}的气温比{second}高多少度？（更低则为负数）",
        "mean": "{date}，“{region}”区域内{first}和{second}两个站点的平均气温是多少度？",
        "frame": "可以用 http_get 访问一个天气服务，文档在 /v2/docs。"
        "服务可能暂时拒绝或出错，请重试。",
        "number": "只回答数字，单位为摄氏度，保留一位小数，例如 12.3。",
        "named": "只回答站点名称和数字，单位为摄氏度，保留一位小数，例如：云岭 12.3",
    },
}


class WeatherApi(GeneratedFamily):
    """The family; task types are the language of names and question."""

    name = "weather_api"
    parts = ("calculator",)
    verify_parts = ("named_number",)

    def extra_tools_source(self) -> str:
        """The service's text, which the tools start as a process."""
        source = (self.folder / "service.py").read_text(encoding="utf-8")
        return f"\n\nSERVICE_SOURCE = {source!r}\n"

    def draw(self, draws: Draws, task_type: str, accepts: Accepts) -> Drawn | None:
        """See ``GeneratedFamily``."""
        words = QUESTIONS[task_type]
        month, day = draws.between(1, 12), draws.between(3, 25)
        year = draws.between(2021, 2025)
        dates = [f"{year}-{month:02d}-{number:02d}" for number in range(day - 2, day + 3)]
        date = dates[2]
        tenths, stations = _draw_stations(draws, task_type, dates)
        region = draws.choice(sorted(REGIONS[task_type]))
        ids = [key for key, station in stations.items() if station["region"] == region]
        kind = draws.choice(KINDS)
        on_date = {key: tenths[key, date] for key in ids}
        first, second = draws.sample(ids, 2)
        answer_id, value = _answer(kind, on_date, first, second)
        if value is None:
            return None
        name = stations[answer_id]["name"] if answer_id else ""
        read = ids if name else [first, second]
        faults = _draw_faults(draws, read)
        asked = [answer_id] if answer_id else [first, second]
        terms = [_celsius_term(stations[key], date) for key in asked]
        rounds = _solution(region, len(ids), read, date, faults)
        rounds.append((("calc", {"expression": _expression(kind, terms)}),))
        answer = f"{'-' if value < 0 else ''}{abs(value) // 10}.{abs(value) % 10}"
        question = words[kind].format(
            region=region,
            date=date,
            first=stations[first]["name"],
            second=stations[second]["name"],
        )
        if not accepts(f"{question}|{sorted(on_date.items())}"):
            return None
        return Drawn(
            instruction=words["frame"] + question + words["named" if name else "number"],
            world={
                "stations": stations,
                "regions": sorted(REGIONS[task_type]),
                "page_size": PAGE_SIZE,
                "faults": faults,
            },
            judge={"name": name, "celsius": answer},
            units={"calls": float(sum(len(turn) for turn in rounds))},
            rounds=tuple(rounds),
            final_text=f"{name} {answer}".strip(),
        )


def _draw_stations(
    draws: Draws, language: str, dates: list[str]
) -> tuple[dict[tuple[str, str], int], dict[str, dict[str, Any]]]:
    """Tenths of a degree Celsius by (station, date), and the service's world."""
    tenths: dict[tuple[str, str], int] = {}
    stations: dict[str, dict[str, Any]] = {}
    numbers = draws.sample(range(100, 1000), 18)
    for region, names in REGIONS[language].items():
        for name in draws.sample(names, draws.between(4, 6)):
            station_id = f"ws-{numbers.pop()}"
            unit = "F" if draws.below(3) == 0 else "C"
            readings = {}
            for date in dates:
                celsius = draws.between(-120, 350)
                tenths[station_id, date] = celsius
                readings[date] = [_in_unit(celsius, unit), draws.between(20, 99)]
            stations[station_id] = {
                "region": region,
                "name": name,
                "keys": KEYS[draws.below(len(KEYS))],
                "unit": draws.choice(UNITS[unit]),
                "readings": readings,
            }
    return tenths, stations


def _in_unit(tenths: int, unit: str) -> float:
    """Exact: a tenth of a degree Celsius is 0.18 degrees Fahrenheit."""
    return tenths / 10 if unit == "C" else round(tenths * 18 + 3200) / 100


def _answer(
    kind: str, tenths: dict[str, int], first: str, second: str
) -> tuple[str | None, int | None]:
    """(station asked for, tenths of a degree); no tenths where the answer would not be exact."""
    if kind in ("warmest", "coldest"):
        extreme = (max if kind == "warmest" else min)(tenths.values())
        found = [key for key, value in tenths.items() if value == extreme]
        return (found[0], extreme) if len(found) == 1 else (None, None)
    if kind == "difference":
        return None, tenths[first] - tenths[second]
    total = tenths[first] + tenths[second]
    return None, total // 2 if total % 2 == 0 else None


def _draw_faults(draws: Draws, read: list[str]) -> dict[str, list[str]]:
    """Every task meets a refusal (429 or 503), most other trouble too; paths that are not needed
    stay good."""
    paths = ["/v2/docs", "/v2/stations", *(f"/v2/stations/{key}/readings" for key in read)]
    faults = {draws.choice(paths[1:]): [draws.choice(FAULTS[:2])]}
    for path in paths:
        if path not in faults and draws.below(4) == 0:
            faults[path] = [draws.choice(FAULTS) for _ in range(draws.between(1, 2))]
    return faults


def _solution(
    region: str,
    num_stations: int,
    read: list[str],
    date: str,
    faults: dict[str, list[str]],
) -> list[tuple[Call, ...]]:
    """Documentation, every page of the list, the readings, each again after its faults."""
    wanted: list[tuple[str, dict[str, str]]] = [("/v2/docs", {})]
    for page in range(1, -(-num_stations // PAGE_SIZE) + 1):
        wanted.append(("/v2/stations", {"region": region, "page": str(page)}))
    wanted += [(f"/v2/stations/{key}/readings", {"date": date}) for key in read]
    left = {path: list(planned) for path, planned in faults.items()}
    rounds: list[tuple[Call, ...]] = []
    for path, query in wanted:
        arguments: dict[str, Any] = {"path": path, "query": query} if query else {"path": path}
        planned = left.get(path, [])
        while planned:
            fault = planned.pop(0)
            rounds.append((("http_get", arguments),))
            if fault in ("429", "503"):
                rounds.append((("wait", {"seconds": 1}),))
            if fault == "slow":
                break
        else:
            rounds.append((("http_get", arguments),))
    return rounds


def _celsius_term(station: dict[str, Any], date: str) -> str:
    """A reading as the expression of its degrees Celsius."""
    text = f"{station['readings'][date][0]:g}"
    return f"({text}-32)/1.8" if station["unit"] in UNITS["F"] else text


def _expression(kind: str, terms: list[str]) -> str:
    """What a careful agent computes from the readings."""
    joined = {
        "difference": f"({terms[0]})-({terms[-1]})",
        "mean": f"(({terms[0]})+({terms[-1]}))/2",
    }.get(kind, terms[0])
    return f"round({joined}, 1)"
