"""Recognise files without text that can be read by their first bytes: documents, pictures, archives, pointers."""

from collections.abc import Sequence

from pretrain.errors import ConfigError, counted, printable, shorten

_UNPACK = "unpack it first"
_AS_ROWS = "write it as Parquet or JSON lines"
_NO_TEXT = "leave it out"
_KINDS = {  # first bytes -> (what, remedy)
    b"version https://git-lfs.github.com/spec/": ("Git LFS pointer", "fetch the file itself: git lfs pull"),
    b"%PDF-": ("PDF document", "convert it to text first: pdftotext FILE"),
    b"{\\rtf": ("RTF document", "convert it to text first"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("document of an old Office program", "convert it to text first"),
    b"BZh": ("bzip2 file", "decompress it first: bunzip2 FILE"),
    b"\xfd7zXZ\0": ("xz file", "decompress it first: unxz FILE"),
    b"\x04\x22\x4d\x18": ("lz4 file", "decompress it first: lz4 -d FILE"),
    b"7z\xbc\xaf\x27\x1c": ("7z archive", _UNPACK),
    b"Rar!\x1a\x07": ("RAR archive", _UNPACK),
    b"WARC/": ("WARC file of web pages", "extract the text first, for example with trafilatura or resiliparse"),
    b"ARROW1": ("Arrow file", "write it as Parquet or JSON lines, for example with Dataset.to_parquet"),
    b"\x93NUMPY": ("NumPy file", _AS_ROWS),
    b"\x89HDF": ("HDF5 file", _AS_ROWS),
    b"SQLite format 3": ("SQLite database", _AS_ROWS),
    b"MMIDIDX": ("index of token files", "they are prepared already"),
    b"\x89PNG\r\n\x1a\n": ("PNG image", _NO_TEXT),
    b"\xff\xd8\xff": ("JPEG image", _NO_TEXT),
    b"GIF8": ("GIF image", _NO_TEXT),
    b"ID3": ("sound file", _NO_TEXT),
    b"\x7fELF": ("program", _NO_TEXT),
}
_WITH_AN = ("A", "E", "O", "HDF", "RTF", "RAR", "SQL", "xz", "lz4", "index")  # how these begin when spoken
_ZIP = b"PK\x03\x04"
_OF_ZIP = {  # bytes in the first file of a zip archive -> (what, remedy)
    b"mimetypeapplication/epub+zip": ("EPUB book", "convert it to text first, for example with pandoc"),
    b"mimetypeapplication/vnd.oasis": ("OpenDocument file", "convert it to text first, for example with pandoc"),
    b"[Content_Types].xml": ("Office document (DOCX, XLSX, PPTX)", "convert it to text first, for example with pandoc"),
    b"_rels/.rels": ("Office document (DOCX, XLSX, PPTX)", "convert it to text first, for example with pandoc"),
}


class OtherFileError(ConfigError):
    """A file `name` is of a known kind that is not read; `what` names the kind."""

    name = what = ""


def check_readable(head: bytes, name: str) -> None:
    """Raise OtherFileError if a file that begins with `head` is of a kind that is not read."""
    what, remedy = next((entry for magic, entry in _KINDS.items() if head.startswith(magic)), ("", ""))
    if head.startswith(_ZIP):
        what, remedy = next((entry for part, entry in _OF_ZIP.items() if part in head[:4096]),
                            ("zip archive", "unpack it first: unzip FILE"))
    elif head[257:262] == b"ustar":
        what, remedy = "tar archive", "unpack it first: tar -xf FILE"
    if what:
        article = "an" if what.startswith(_WITH_AN) else "a"
        error = OtherFileError(name, problem=f"this is {article} {what}, which is not read", remedy=remedy)
        error.name, error.what = name, what
        raise error


def is_web_page(head: bytes) -> bool:
    """Return whether a file begins as an HTML page."""
    return head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html"))


def other_files_error(errors: Sequence[OtherFileError], can_skip: bool) -> ConfigError:
    """Return one error for all files that are not read, by kind."""
    hint = "--on_error skip leaves {} out"
    if len(errors) == 1:
        return ConfigError.from_line(f"{errors[0]} {hint.format('such files')}." if can_skip else str(errors[0]))
    return ConfigError(counted(len(errors), "file"), problem=f"they are not read: {files_by_kind(errors)}",
                       remedy=f"convert or move them; {hint.format('them')}" if can_skip else "convert or move them")


def files_by_kind(errors: Sequence[OtherFileError]) -> str:
    """List kinds of files, with examples: "2 PNG images (a.png, b.png), 1 EPUB book (c.epub)"."""
    names: dict[str, list[str]] = {}
    for error in errors:
        names.setdefault(error.what, []).append(error.name)
    return printable(", ".join(
        f"{counted(len(found), what)} ({shorten(', '.join(found[:3]), 200)}{', ...' * (len(found) > 3)})"
        for what, found in names.items()))
