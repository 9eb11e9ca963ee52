from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeload._sizes import format_least, format_size, parse_share, parse_size, show_limit
from pipeload.errors import OptionError

LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        pytest.param(4096, 4096, id="int is bytes"),
        pytest.param("1234567", 1234567, id="bare digits are bytes"),
        pytest.param("512 B", 512, id="bytes spelled out"),
        pytest.param("800 kB", 800_000, id="kilo"),
        pytest.param("512MB", 512 * 10**6, id="mega"),
        pytest.param("2GB", 2 * 10**9, id="giga"),
        pytest.param("1TB", 10**12, id="tera"),
        pytest.param("1PB", 10**15, id="peta"),
        pytest.param("3KiB", 3 * 2**10, id="kibi"),
        pytest.param("3MiB", 3 * 2**20, id="mebi"),
        pytest.param("2GiB", 2 * 2**30, id="gibi"),
        pytest.param("1TiB", 2**40, id="tebi"),
        pytest.param("1PiB", 2**50, id="pebi"),
        pytest.param("1.5GB", 1_500_000_000, id="fraction, decimal"),
        pytest.param("1.5GiB", 3 * 2**29, id="fraction, binary"),
        pytest.param("0.1GB", 10**8, id="a fraction that no float holds"),
        pytest.param("0.3333kB", 333, id="what is below a byte is cut off"),
        pytest.param("2gb", 2 * 10**9, id="lower case"),
        pytest.param("2GIB", 2 * 2**30, id="upper case"),
        pytest.param("  2  GB ", 2 * 10**9, id="spaces"),
        pytest.param("4G", 4 * 10**9, id="a letter, decimal"),
        pytest.param("512m", 512 * 10**6, id="a letter, lower case"),
        pytest.param("1000k", 10**6, id="kilo, a letter"),
        pytest.param("1e9", 10**9, id="an exponent"),
        pytest.param("1.5E+9", 1_500_000_000, id="a fraction with an exponent"),
        pytest.param("1e3 MB", 10**9, id="an exponent and a unit"),
        pytest.param("1e3", 1000, id="an exponent says that bytes are meant"),
        pytest.param("4 B", 4, id="so does the unit"),
        pytest.param(4, 4, id="an int is bytes, however small"),
        pytest.param(LARGEST, LARGEST, id="the largest"),
    ],
)
def test_a_size_is_read_exactly(value: int | str, nbytes: int) -> None:
    """Decimal units are powers of 1000, binary ones of 1024; nothing goes through a float."""
    assert parse_size(value) == nbytes


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(True, "is a bool", id="bool"),
        pytest.param(4e9, "is a float", id="float"),
        pytest.param(float("nan"), "is a float", id="nan"),
        pytest.param(None, "is a NoneType", id="None"),
        pytest.param(0, "not a positive size", id="zero"),
        pytest.param(-1, "not a positive size", id="negative"),
        pytest.param("0GB", "not a positive size", id="zero with a unit"),
        pytest.param("0.1kB0", "not a size", id="digits after the unit"),
        pytest.param("0.0001kB", "not a positive size", id="less than a byte"),
        pytest.param("-2GB", "not a size", id="negative text"),
        pytest.param("+2GB", "not a size", id="signed text"),
        pytest.param("", "not a size", id="empty"),
        pytest.param("GB", "not a size", id="no number"),
        pytest.param("nan", "not a size", id="nan as text"),
        pytest.param("1e-9", "not a size", id="negative exponent"),
        pytest.param("1e999", "not a size", id="long exponent"),
        pytest.param("1e99", "larger than any memory", id="large exponent"),
        pytest.param("4", 'is 4 bytes (did you mean "4GB"?)', id="a few gigabytes"),
        pytest.param("1.5", 'is 1.5 bytes (did you mean "1.5GB"?)', id="a fraction alone"),
        pytest.param(" 512 ", 'is 512 bytes (did you mean "512MB"?)', id="some megabytes"),
        pytest.param("999999", 'did you mean "999999kB"?', id="the largest that lacks a unit"),
        pytest.param("1_000", "not a size", id="underscore"),
        pytest.param("1,5GB", "not a size", id="comma"),
        pytest.param("1.GB", "not a size", id="point without digits"),
        pytest.param("\u0662GB", "not a size", id="digits of another script"),
        pytest.param("2 G B", "not a size", id="space in the unit"),
        pytest.param("2GX", "unknown unit 'gx'", id="unknown unit"),
        pytest.param("auto", "not a size", id="auto is for the caller"),
        pytest.param("1000000.5", "is the unit missing", id="half a byte"),
        pytest.param("1.5B", "is the unit missing", id="half a byte, spelled out"),
        pytest.param(LARGEST + 1, "larger than any memory", id="too large"),
        pytest.param("9" * 20 + "PB", "larger than any memory", id="too large with a unit"),
        pytest.param("9" * 10_000, "not a size", id="thousands of digits"),
        pytest.param(10**10_000, "an int of 33220 bits", id="an int that cannot be printed"),
    ],
)
def test_what_is_no_size_is_refused(value: int | str, reason: str) -> None:
    """A wrong size names the option, shows what was got and how sizes are written, in few words."""
    with pytest.raises(OptionError) as caught:
        parse_size(value, name="host_memory_limit")
    message = str(caught.value)
    assert message.startswith("host_memory_limit=")
    assert reason in message
    assert '"2GB"' in message
    assert len(message) < 400
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (88_100_000, "88.1 MB"),
        (1_234_567_890, "1.23 GB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (3 * 10**12, "3.00 TB"),
        (12_345 * 10**15, "12345 PB"),
        (-88_100_000, "-88.1 MB"),
    ],
)
def test_a_size_is_shown_with_three_digits(nbytes: int, text: str) -> None:
    """Sizes in messages are short, and roll over to the next unit where they round up to it."""
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (4, '4 bytes (4 B; did you mean "4GB"?)'),
        (8000, '8000 bytes (8.00 kB; did you mean "8000MB"?)'),
        (123_456, '123456 bytes (123 kB; did you mean "123456kB"?)'),
        (88_123_456, "88123456 bytes (88.1 MB)"),
    ],
)
def test_a_limit_that_lacks_its_unit_says_so(limit: int, text: str) -> None:
    """As an int it is bytes, but nobody means so few."""
    assert show_limit(limit) == text


@given(st.integers(1, LARGEST))
def test_a_shown_size_reads_back_as_about_itself(nbytes: int) -> None:
    """What pipeload prints can be passed to it, and is within half of the third digit."""
    shown = format_size(nbytes)
    assert abs(parse_size(shown) - nbytes) * 200 <= nbytes
    assert parse_size(f"{nbytes}B") == parse_size(nbytes) == nbytes
    assert nbytes < 10**6 or parse_size(str(nbytes)) == nbytes


@given(st.decimals("0.001", 1000, places=6), st.sampled_from(["MB", "MiB", "GB", "GiB"]))
def test_fractions_are_exact(number: object, unit: str) -> None:
    """A fraction of a unit is that fraction of its bytes, rounded down."""
    factor = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}[unit]
    assert parse_size(f"{number:f} {unit}") == int(Fraction(str(number)) * factor)


@given(st.text() | st.from_regex(r"\s*[0-9.]+ ?[kmgtpKMGTP]?i?[bB]?", fullmatch=True))
def test_any_text_is_a_size_or_an_option_error(text: str) -> None:
    """No text makes anything but a positive size or pipeload's own error."""
    try:
        nbytes = parse_size(text)
    except OptionError:
        nbytes = 1
    assert 0 < nbytes <= LARGEST


@pytest.mark.parametrize(("text", "share"), [("50%", 0.5), ("100 %", 1.0), (" 12.5% ", 0.125)])
def test_shares(text: str, share: float) -> None:
    """Percentages of what the system allows."""
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "50", "five%", "1e1%"])
def test_no_shares(text: str) -> None:
    """What is none is refused by name."""
    with pytest.raises(OptionError, match=r"memory_limit=.*is no percentage"):
        parse_share(text)


@given(st.integers(0, LARGEST // 2))
def test_what_is_said_to_be_enough_is_enough(nbytes: int) -> None:
    """Typed as it is shown, it is no less, and more by no more than its last digit."""
    said = format_least(nbytes)
    typed = int(said.removesuffix(" B")) if nbytes < 1000 else parse_size(said)
    assert nbytes <= typed <= nbytes + max(0, nbytes // 100)
