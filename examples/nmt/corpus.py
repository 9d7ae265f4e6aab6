"""Parallel text: gettext catalogues (those that Django carries, by default) and tab-separated files."""

import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

CATALOGUES = ("conf/locale/{0}/LC_MESSAGES/*.po", "contrib/*/locale/{0}/LC_MESSAGES/*.po")

_KEYWORD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)\s*(".*")')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class CorpusError(ValueError):
    """Parallel text is missing, or a file of it cannot be read; the message is one line."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A line of source text and its translation."""

    source: str
    target: str


@dataclass(slots=True)
class _Entry:
    """One message of a .po file: its fields as they are read, and whether it is marked fuzzy."""

    fields: dict[str, str] = field(default_factory=dict)
    fuzzy: bool = False

    def pairs(self) -> Iterator[Pair]:
        """Yield the message's translations; the plural takes the last form, which every language uses for many."""
        forms = [text for name, text in self.fields.items() if name.startswith("msgstr")]
        if self.fuzzy or not forms:
            return
        yield Pair(self.fields.get("msgid", ""), forms[0])
        yield Pair(self.fields.get("msgid_plural", ""), forms[-1])


def read_po(path: Path) -> list[Pair]:
    """Read the translated messages of a gettext .po file, without its header and its fuzzy messages.

    Raises:
        CorpusError: a line is neither a comment, a keyword with a string, nor a string; names file and line.
    """
    entry, entries, name = _Entry(), [], ""
    for number, line in _numbered_lines(path):
        keyword = _KEYWORD.fullmatch(line)
        starts_entry = line.startswith("#") or (keyword and keyword[1] in ("msgctxt", "msgid"))
        if starts_entry and any(part.startswith("msgstr") for part in entry.fields):
            entries.append(entry)
            entry = _Entry()
        if line.startswith("#"):
            entry.fuzzy |= line.startswith("#,") and "fuzzy" in line
        elif keyword:
            name = keyword[1]
            entry.fields[name] = _unquote(keyword[2], path, number)
        elif line and name in entry.fields:
            entry.fields[name] += _unquote(line, path, number)
        elif line:
            raise CorpusError(f'{path}:{number}: expected a comment, a keyword or a "string", found {line[:40]!r}')
    return clean(pair for entry in [*entries, entry] for pair in entry.pairs())


def read_tsv(path: Path) -> list[Pair]:
    """Read lines of `SOURCE<TAB>TARGET`; blank lines are skipped.

    Raises:
        CorpusError: the file cannot be read, or a line has not exactly two non-empty fields; names file and line.
    """
    pairs = []
    for number, line in _numbered_lines(path):
        if not line:
            continue
        fields = [part.strip() for part in line.split("\t")]
        if len(fields) != 2 or not all(fields):
            filled = sum(map(bool, fields))
            raise CorpusError(f"{path}:{number}: expected SOURCE<TAB>TARGET, found {filled} non-empty of {len(fields)}")
        pairs.append(Pair(*fields))
    if not pairs:
        raise CorpusError(f"{path}: no lines; expected SOURCE<TAB>TARGET on each")
    return clean(pairs)


def read_django(language: str = "vi") -> list[Pair]:
    """Read English and `language` ("vi", "de", or any other that Django speaks) from the installed Django's catalogues.

    Raises:
        CorpusError: Django is not installed, or carries no catalogue of that language.
    """
    spec = find_spec("django")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(
            "Django, whose catalogues are the default text, is not installed: pip install Django, "
            "or give a FILE.tsv of SOURCE<TAB>TARGET lines"
        )
    root = Path(spec.submodule_search_locations[0])
    paths = [path for pattern in CATALOGUES for path in sorted(root.glob(pattern.format(language)))]
    if not paths or not re.fullmatch(r"\w+", language):
        known = sorted({path.parents[1].name for path in root.glob(CATALOGUES[0].format("*"))} - {"en"})
        raise CorpusError(f"Django carries no catalogue of {language!r}; it has {', '.join(known)}")
    return clean(pair for path in paths for pair in read_po(path))


def clean(pairs: Iterable[Pair]) -> list[Pair]:
    """Normalise to NFC and single spaces; drop repeated pairs and those with an empty side."""
    tidy = (Pair(_tidy(pair.source), _tidy(pair.target)) for pair in pairs)
    return list(dict.fromkeys(pair for pair in tidy if pair.source and pair.target))


def split(pairs: Sequence[Pair], validation: float = 0.1, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Split into training and validation pairs; a source text is on one side only, and each side has at least one.

    Raises:
        CorpusError: fewer than two different source texts.
    """
    sources = sorted({pair.source for pair in pairs})
    if len(sources) < 2:
        raise CorpusError(f"{len(sources)} different source texts are too few: training and validation need one each")
    random.Random(seed).shuffle(sources)
    count = min(max(1, round(validation * len(sources))), len(sources) - 1)
    held = set(sources[:count])
    return [pair for pair in pairs if pair.source not in held], [pair for pair in pairs if pair.source in held]


def _tidy(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _unquote(text: str, path: Path, number: int) -> str:
    if not _STRING.fullmatch(text):
        raise CorpusError(f'{path}:{number}: expected a "string", found {text[:40]!r}')
    try:
        return re.sub(r"\\(.)", lambda match: _ESCAPES[match[1]], text[1:-1])
    except KeyError as error:
        raise CorpusError(f"{path}:{number}: the escape \\{error.args[0]} is not known") from None


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the stripped lines of a UTF-8 file from 1; blanks around TABs stay, so that empty fields show."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            yield number, line.decode().strip("\r\n ")
        except UnicodeDecodeError:
            raise CorpusError(f"{path}:{number}: not UTF-8 text") from None
