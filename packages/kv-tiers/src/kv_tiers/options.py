"""Parses the options of one tier, codec or policy strictly; errors name the nearest valid option.

An option in bytes is named `…_bytes`; it may be an integer or text such as "4MiB".
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
from kv_core.errors import ConfigError, did_you_mean

_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate(("k", "M", "G", "T", "P"), 1)},
}
_BYTES: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?(?:[eE]\+?([0-9]{1,2}))?\s*([A-Za-z]*)")
BYTES_PATTERN: Final = (
    rf"\s*[0-9]{{1,18}}(\.[0-9]{{1,18}})?([eE]\+?[0-9]{{1,2}})?\s*({'|'.join(filter(None, _UNITS))})?\s*"
)
"""Matches text that `byte_count` accepts, for schemas; `byte_count` also refuses fractions of a byte."""
_IN_WORDS: dict[str, str] = {}
_MATCHING: Final = re.compile(r"matching regex '(.*)'(?= - at |$)")
_LIKE_A_FLOAT: Final = re.compile(r"[0-9]+(\.[0-9]*|(\.[0-9]*)?[eE]\+?[0-9]{1,2})")

Settings = TypeVar("Settings", bound=msgspec.Struct)


def spelled_as(pattern: str, words: str, **about: Any) -> msgspec.Meta:
    """A constraint on text, all of it. words: what matches, for errors (`in_words`). about: as in `msgspec.Meta`."""
    whole = rf"^(?:{pattern})$(?!\n)"  # `$` also matches before a newline at the end, and schemas know no `\Z`
    assert _IN_WORDS.setdefault(whole, words) == words, "errors would name it by whichever was imported last"
    return msgspec.Meta(pattern=whole, **about)


def in_words(error: Exception) -> str:
    """The text of msgspec's error, with words in the place of a regular expression."""

    def words(match: re.Match[str]) -> str:
        return f"that is {_IN_WORDS.get(match[1].replace(2 * chr(92), chr(92)), 'of another form')}"

    return _MATCHING.sub(words, str(error))


def read_options(settings: type[Settings], options: Mapping[str, object], where: str) -> Settings:
    """The settings in `options`. where: the user's name for this place, for errors. Raises `ConfigError`: an unknown
    option, naming the nearest known one; a value of the wrong type or out of range."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(settings)}
    for name in options:
        if name not in fields:
            raise ConfigError(f"{where}: there is no option {name!r}; {did_you_mean(name, fields)}")
    values = {name: counted(name, value, f"{where}: {name}", fields[name].type) for name, value in options.items()}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: {name} is {value}; write a finite number")
    try:
        return msgspec.convert(values, settings)
    except msgspec.ValidationError as error:
        missing = [name for name, field in fields.items() if field.required and name not in values]
        if missing:
            raise ConfigError(f"{where}: `{'` and `'.join(missing)}` must be given; write {missing[0]}: …") from None
        text = in_words(error).replace("`$.", "`")
        raise ConfigError(f"{where}: {text}{_choices(fields, str(error))}") from None


def _choices(fields: Mapping[str, msgspec.structs.FieldInfo], error_text: str) -> str:
    """What may be written for the option that this error is about, if that is one of a few words."""
    match = re.search(r" - at `\$\.(\w+)`$", error_text)
    wanted = fields[match[1]].type if match is not None and match[1] in fields else None
    return f"; write one of {', '.join(get_args(wanted))}" if get_origin(wanted) is Literal else ""


def counted(name: str, value: object, where: str, wanted: Any) -> object:
    """The value of an option: a number where it counts bytes and was written as text, and an integer where it was
    written as a float without a fraction. Helm renders integers so: 256.0, 5.36e+11, and 1e+06, which YAML takes for
    text. Raises as `byte_count` does.

    wanted: the option's type.
    """
    if isinstance(value, Mapping) and name.endswith("_bytes"):
        return {key: counted(name, one, f"{where}: {key}", int) for key, one in value.items()}
    if isinstance(value, str) and _LIKE_A_FLOAT.fullmatch(value) and not _takes(wanted, str):
        value = float(value) if _takes(wanted, int) or _takes(wanted, float) else value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return byte_count(value, where) if name.endswith("_bytes") and isinstance(value, str) else value


def _takes(wanted: Any, kind: type) -> bool:
    """Whether a value of this type may be set, in what may be an annotated or optional type."""
    return wanted is kind or any(_takes(part, kind) for part in get_args(wanted) if get_origin(wanted) is not Literal)


def byte_count(value: int | str, where: str) -> int:
    """A number of bytes from a whole number or text: "4096", "4MiB", "1.5 GiB", "2GB" (units of 1000), "5.36e+11".
    Raises `ConfigError`: anything else, or a fraction of a byte."""
    if isinstance(value, int):
        return value
    match = _BYTES.fullmatch(value.strip())
    if match is None or match[4] not in _UNITS:
        raise ConfigError(f'{where} is {value!r}; write a whole number of bytes, or text such as "4MiB" or "2GB"')
    unit, fraction = _UNITS[match[4]] * int("1" + "0" * int(match[3] or 0)), match[2] or ""
    nbytes, remainder = divmod(int(match[1] + fraction) * unit, int("1" + "0" * len(fraction)))
    if remainder:
        raise ConfigError(f"{where} is {value!r}, which is not a whole number of bytes")
    return nbytes
