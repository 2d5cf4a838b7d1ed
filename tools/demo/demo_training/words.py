"""Word lists, and functions that make up words, names and strings."""

from __future__ import annotations

import string
from random import Random

from .items import Source

NAMES = """Ada Alan Alice Amir Anna Arjun Bea Ben Bob Carla Carlos Chen Clara Dana David Diego Elena Elif Emma
Eric Eva Farah Felix Finn Frida Grace Hana Hugo Ida Igor Ines Ivan Jack James Jana Jo John Jonas Julia Karl
Kate Kenji Lara Laura Lena Leo Liam Lina Linda Lucas Luis Maria Mark Marta Mary Max Maya Mia Mila Mira Nadia
Nils Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Priya Quinn Rosa Ruth Sam Sara Sofia Tara Tim Tom Uma
Vera Victor Wei Yara Yuki Zoe""".split()

CITIES = """Accra Amsterdam Athens Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest Cairo Chicago
Copenhagen Dallas Delhi Denver Dublin Geneva Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyiv Kyoto Lagos
Lima Lisbon London Lyon Madrid Manila Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo
Paris Porto Prague Quito Riga Rome Seattle Seoul Sofia Stockholm Sydney Taipei Tallinn Tokyo Toronto Tunis
Turin Vienna Vilnius Warsaw Zagreb Zurich""".split()

LONG_CITIES = """New York,San Francisco,Los Angeles,Hong Kong,New Delhi,Buenos Aires,Mexico City,Cape Town,Tel Aviv,
Rio de Janeiro,San Diego,Las Vegas,Abu Dhabi,The Hague,Salt Lake City,Santa Fe""".replace(
    "\n", ""
).split(",")

PLAIN = """a about after again all also an and any are as at back be because big blue book bright but by came can
car cat child city clear cold come could day dog door down each early earth end every eye far fast few find
fire first fish five for four friend from garden give go good great green had hand happy has have he head her
here high his home hot house how if in into is it kind last late left light like line little long look made
make man many may milk moon more morning most mother much must my name near never new next night no north not
now of off old on one open or other our out over own paper part people place plant play put quick quiet rain
read red right river road room run said same saw say school sea see she ship short should side sing sister
sky sleep slow small snow so some soon south star start still stone stop story sun table take tall tell than
that the their them then there these they thing think this three time to today tree two under until up us
use very walk wall want warm was water way we week well went were what when where which white who why will
wind window winter with wood word work world would year yellow yes you young your""".split()

THINGS = """apples balls bikes birds books bottles boxes bricks cakes cards cars cats chairs coins cookies cups
dogs eggs fish flowers hats keys lamps lemons letters marbles nuts oranges pens pencils photos plates rocks
shells shoes stamps stars sticks tickets toys trees""".split()

WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November December""".split()

_ONSETS = """b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn sp st t th tr
v w y z""".split()
_VOWELS = "a e i o u a e i o u ai au ea ee ie oa oo ou".split()
_CODAS = "|||||b|ck|d|f|g|k|l|ll|m|n|nd|ng|nt|p|r|rd|rk|rt|s|sh|ss|st|t|th|x|z".split("|")
# Characters outside ASCII by code point, first and last of each range: accents, Greek, Cyrillic,
# punctuation and arrows, kana, Chinese, Hangul, pictures.
_RANGES = (
    (0xC0, 0xFF), (0xC0, 0xFF), (0xA1, 0x17F), (0x3B1, 0x3C9), (0x410, 0x44F), (0x2010, 0x2027), (0x2190, 0x2199),
    (0x3041, 0x3093), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x1F600, 0x1F6FF), (0x20A0, 0x20BF),
)  # fmt: skip


def made_up(rng: Random) -> str:
    """Return a pronounceable lower-case word of one to three syllables."""
    count = rng.choice((1, 2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count)
    )


def word(source: Source) -> str:
    """Return a made-up lower-case word."""
    return source.draw("value", lambda: made_up(source.rng))


def name(source: Source) -> str:
    """Return a first name, made up in half of the cases, sometimes with a surname."""
    rng = source.rng

    def make() -> str:
        given = rng.choice(NAMES) if rng.random() < 0.5 else made_up(rng).capitalize()
        return f"{given} {made_up(rng).capitalize()}" if rng.random() < 0.15 else given

    return source.draw("value", make)


def city(source: Source) -> str:
    """Return a city, made up in half of the cases, sometimes of several words."""
    rng = source.rng

    def make() -> str:
        kind = rng.random()
        if kind < 0.12:
            return rng.choice(LONG_CITIES)
        if kind < 0.2:
            return f"{made_up(rng).capitalize()} {made_up(rng).capitalize()}"
        return rng.choice(CITIES) if kind < 0.6 else made_up(rng).capitalize()

    return source.draw("value", make)


def number(source: Source, low: int, high: int) -> int:
    """An integer in [low, high]."""
    return int(source.draw("value", lambda: str(source.rng.randint(low, high))))


def date(source: Source) -> str:
    """A date as YYYY-MM-DD."""
    rng = source.rng

    def make() -> str:
        return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    return source.draw("value", make)


def clock(source: Source) -> str:
    """A time of day as HH:MM."""
    return source.draw(
        "value", lambda: f"{source.rng.randint(0, 23):02}:{source.rng.randint(0, 59):02}"
    )


def code(source: Source) -> str:
    """An identifier such as `A4417` or `kz-903`."""
    rng = source.rng

    def make() -> str:
        letters = "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(1, 3)))
        digits = "".join(rng.choice(string.digits) for _ in range(rng.randint(2, 5)))
        text = letters + rng.choice(("", "", "-")) + digits
        return text.lower() if rng.random() < 0.3 else text

    return source.draw("value", make)


def email(source: Source) -> str:
    """A mail address of two made-up words."""
    return f"{word(source)}@{word(source)}.{source.rng.choice(('com', 'org', 'net'))}"


def path(source: Source) -> str:
    """A file name or a path of up to three made-up parts."""
    rng = source.rng
    parts = [word(source) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        parts.insert(0, rng.choice(("etc", "usr", "home", "tmp", "var", "src", "docs", "data")))
    lead = rng.choice(("", "/", "/", "./", "~/", "../")) if len(parts) > 1 else ""
    ending = rng.choice(
        (".txt", ".py", ".json", ".csv", ".md", ".log", ".toml", "" if lead else ".html")
    )
    return lead + "/".join(parts) + ending


def random_string(source: Source, longest: int = 24) -> str:
    """Characters drawn one by one from a random alphabet, without spaces."""
    rng = source.rng
    alphabets = (
        string.ascii_lowercase,
        string.ascii_letters,
        string.ascii_letters + string.digits,
        string.hexdigits.lower(),
        string.digits,
        string.ascii_uppercase,
        string.ascii_letters + string.digits + "-_.:/+#$%&*!?=~@",
    )

    def make() -> str:
        alphabet = rng.choice(alphabets)
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(4, longest)))

    return source.draw("value", make)


def symbol(rng: Random) -> str:
    """One character outside ASCII."""
    return chr(rng.randint(*rng.choice(_RANGES)))
