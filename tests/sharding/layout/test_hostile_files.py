"""Files that are no layouts, by accident or on purpose: each is refused soon, in little memory, and says why."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from autopar.errors import LayoutError
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.source import MAX_CHARACTERS
from autopar.sharding.layout.tokens import MAX_LINE, MAX_WORD

GIVE = "\nfix: give a layout file"


def refused(path: Path) -> str:
    with pytest.raises(LayoutError) as error:
        Layout.load(path)
    assert error.value.code == "E0"
    return str(error.value)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "my.lay"
    path.write_bytes(content)
    return path


class Explosive:
    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (1,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_read_as_text_and_never_loaded(tmp_path: Path, protocol: int) -> None:
    message = refused(written(tmp_path, pickle.dumps(Explosive(), protocol)))
    assert message.startswith(f"E0: {tmp_path}/my.lay is no text: " if protocol > 1 else "E0: ")
    assert "\nfix: " in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            bytes(range(128, 256)),
            "is no text: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
        ),
        (b"\x7fELF\x02\x01\x01" + bytes(9), "the character U+007F has no meaning here"),
        (b"batch -> dp\n\0\0\0", "the character U+0000 has no meaning here"),
        (b"\x1b[2Jbatch -> dp", "the character U+001B has no meaning here"),
        ("batch -> dp".encode("utf-16"), "is no text: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_binary_garbage(tmp_path: Path, content: bytes, message: str) -> None:
    found = refused(written(tmp_path, content))
    assert message in found
    assert all(character.isprintable() or character == "\n" for character in found), "nothing reaches the terminal"


@pytest.mark.parametrize("piece", [b"x", b" ", b"#", b"batch -> dp\n", b"dp*", b"param { ", b"(", b"@a[", b'\\"'])
def test_files_of_100_megabytes_are_not_read_to_the_end(tmp_path: Path, piece: bytes) -> None:
    path = written(tmp_path, b"batch -> " + piece * (MAX_CHARACTERS // len(piece)))
    os.truncate(path, 100_000_000)  # the rest takes no room on the disk
    assert refused(path) == f"E0: {path} is longer than 4,194,304 bytes, which no layout is{GIVE}"


@pytest.mark.parametrize("piece", ["x", "9", "dp*", "param { ", "(", "@a[", '"', "seq,"])
def test_lines_and_words_without_end(tmp_path: Path, piece: str) -> None:
    text = piece * (MAX_LINE // len(piece) + 1)
    assert refused(written(tmp_path, text.encode())).startswith(
        f"E0: a line has at most 65,536 characters, and this one has {len(text):,}\n  {tmp_path}/my.lay:1 | {piece}"
    )
    for shorter in (text[: MAX_LINE // 2], f"batch -> {text[: MAX_LINE // 2]}"):
        with pytest.raises(LayoutError) as error:
            parse_layout(shorter)
        assert len(str(error.value)) < 2000


def test_a_name_of_any_length_is_not_repeated() -> None:
    text = "batch -> " + "a" * (MAX_WORD + 1)
    with pytest.raises(LayoutError) as error:
        parse_layout(text, "my.lay")
    assert str(error.value).startswith("E0: a word has at most 1,000 characters, and this one has 1,001\n  my.lay:1 |")
    parse_layout(text[:-1], "my.lay")


@pytest.mark.parametrize("text", ["mesh dp={}", "limit memory {}GiB", "limit halo {}%", "seq -> dp !{}"])
@pytest.mark.parametrize("digits", [MAX_WORD, MAX_WORD + 1, 30_000])
def test_numbers_of_many_digits(text: str, digits: int) -> None:
    with pytest.raises(LayoutError, match=r"E0: ") as error:
        parse_layout(text.format("9" * digits))
    assert len(str(error.value)) < 2500


def test_names_for_axes_that_grow_without_end() -> None:
    lines = ["let a0 = x*y", *(f"let a{i} = a{i - 1}*b{i}" for i in range(1, 60)), "batch -> a59"]
    assert len(parse_layout("\n".join(lines)).statements) == 61
    doubled = ["let a0 = x", *(f"let a{i} = a{i - 1}*a{i - 1}" for i in range(1, 60)), "batch -> a59"]
    with pytest.raises(LayoutError, match="axis 'a0' stands twice in a product"):
        parse_layout("\n".join(doubled))


def test_a_mark_before_the_first_line_is_no_mistake(tmp_path: Path) -> None:
    assert Layout.load(written(tmp_path, b"\xef\xbb\xbfbatch -> dp\r\n")) == parse_layout("batch -> dp")


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"E0: {tmp_path} cannot be read: Is a directory{GIVE}"
    loop, pool, pipe = (tmp_path / name for name in ("loop.lay", "pool.lay", "pipe.lay"))
    loop.symlink_to(pool)
    pool.symlink_to(loop)
    assert refused(loop) == f"E0: {loop} cannot be read: Too many levels of symbolic links{GIVE}"
    os.mkfifo(pipe)
    assert refused(pipe) == f"E0: {pipe} is not a regular file{GIVE}"
    assert refused(Path("/dev/zero")) == f"E0: /dev/zero is not a regular file{GIVE}"
    assert refused(Path("a\0b.lay")) == f"E0: 'a\\x00b.lay' cannot be read: embedded null byte{GIVE}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = written(tmp_path, b"batch -> dp")
    path.chmod(0)
    assert refused(path) == f"E0: {path} cannot be read: Permission denied{GIVE}"
