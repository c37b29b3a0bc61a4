"""Images: references that stay where they may, broken files named before training, pixels as the file means them."""

import http.server
import io
import os
import struct
import threading
import zlib
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.data.pictures import encode, encoded, write
from vembed.data.examples import BadRecord, ImageRef, ImageRoot
from vembed.data.images.files import image_problem, image_size, load_image
from vembed.errors import UserError


def check_image(image):
    if (problem := image_problem(image)) is not None:
        raise BadRecord(problem)


def assert_refused(image, said):
    """Both the first pass and a step refuse an image."""
    for use in (check_image, load_image):
        with pytest.raises(UserError, match=said):
            use(image)


FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "images"
    write(folder / "a.jpg")
    write(folder / "deep" / "b.png", "PNG")
    secret = write(tmp_path / "secret.jpg")
    (folder / "link.jpg").symlink_to(secret)
    (folder / "folder").symlink_to(tmp_path)
    (folder / "inside.jpg").symlink_to(folder / "a.jpg")
    return folder


def references(folder, allow_urls=False):
    return ImageRoot(str(folder), allow_urls=allow_urls)


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("a.jpg", "a.jpg"),
        ("./deep/../a.jpg", "a.jpg"),
        ("deep/b.png", "deep/b.png"),
        ("inside.jpg", "inside.jpg"),
        ("/secret.jpg", "../secret.jpg"),
    ],
)
def test_relative_and_absolute_paths(root, path, file):
    expected = os.path.normpath(root / file)
    path = expected if path.startswith("/") else path
    reference = references(root).reference(path)
    assert reference == ImageRef(path=expected)
    check_image(reference)


@pytest.mark.parametrize(
    "path",
    [
        "../secret.jpg",
        "deep/../../secret.jpg",
        "link.jpg",
        "folder/secret.jpg",
    ],
)
def test_a_relative_path_or_link_may_not_lead_out(root, path):
    with pytest.raises(BadRecord, match=r"leads out of image_root .*: set image_root"):
        references(root).reference(path)


def test_a_root_that_is_a_link_or_relative(root, monkeypatch):
    linked = root.with_name("linked")
    linked.symlink_to(root)
    monkeypatch.chdir(root.parent)
    images = [references(folder).reference("a.jpg") for folder in (linked, "images")]
    monkeypatch.chdir("/")
    for image in images:
        check_image(image)


def test_addresses_only_where_allowed(root):
    address = "https://example.org/a.jpg"
    with pytest.raises(BadRecord, match="allow_image_urls: true"):
        references(root).reference(address)
    reference = references(root, allow_urls=True).reference(address)
    assert reference == ImageRef(path=address)
    check_image(reference)  # not fetched before it is needed


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("keep", [0.3, 0.95])
def test_truncated_images_are_refused_by_name(tmp_path, format_name, keep):
    data = encoded(format_name, size=(120, 90))
    path = tmp_path / "cut.img"
    path.write_bytes(data[: int(len(data) * keep)])
    assert_refused(ImageRef(path=str(path)), r"image .*cut\.img is broken")


def test_missing_image_folder_pipe_and_circle(tmp_path):
    (tmp_path / "circle.jpg").symlink_to(tmp_path / "circle.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    for path, message in {
        tmp_path / "gone.jpg": "does not exist",
        tmp_path / "circle.jpg": "is broken or cannot be read",
        tmp_path / "pipe.jpg": "not a regular file",
        tmp_path: "not a regular file",
        "n" * 400: "cannot be read",
    }.items():
        with pytest.raises(BadRecord, match=message):
            check_image(ImageRef(path=str(path)))


def chunk(kind, body):
    """A chunk of a PNG file."""
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def test_a_few_bytes_that_unpack_to_gigabytes_are_refused():
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 100))]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")
    assert_refused(ImageRef(data=bomb), "89,478,485 pixels")


def test_formats_that_start_other_programs_are_unknown():
    data = encode(Image.new("RGB", (4, 4)), "EPS")
    assert_refused(ImageRef(data=data), "unknown format")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=8),
    st.floats(0.0, 1.0),
    st.binary(max_size=20),
)
def test_damaged_images_are_read_or_named(format_name, damage, keep, end):
    data = bytearray(encoded(format_name))
    for place, value in damage:
        data[int(place * len(data))] = value
    image = ImageRef(data=bytes(data[: max(1, int(len(data) * keep))]) + end)
    for use in (check_image, load_image):
        try:
            use(image)
        except UserError as error:
            assert str(error).startswith("image of ")


def test_transparency_keeps_the_colours():
    red = encode(Image.new("RGBA", (4, 4), (200, 10, 10, 128)), "PNG")
    assert load_image(ImageRef(data=red)).getpixel((0, 0)) == (200, 10, 10)
    palette = Image.new("RGB", (4, 4), (1, 200, 3)).quantize(4)
    data = encode(palette, "PNG", transparency=b"\xff\x80\x00\xff")
    assert load_image(ImageRef(data=data)).getpixel((0, 0)) == (1, 200, 3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_cut(kind):
    deep = Image.fromarray(np.full((4, 4), 32_896, dtype=np.uint16))
    loaded = load_image(ImageRef(data=encode(deep, kind)))
    assert loaded.getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize(
    "dtype, kind", [(np.float32, "floating-point"), (np.int32, "signed or 32-bit")]
)
def test_pixels_whose_range_is_unknown_are_refused(dtype, kind):
    data = encode(Image.fromarray(np.full((4, 4), 200, dtype=dtype)), "TIFF")
    said = f"{kind} pixels, whose range is unknown: convert it to 8 bits"
    assert_refused(ImageRef(data=data), said)


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_upright(format_name, orientation):
    picture = Image.fromarray(np.arange(8 * 4 * 3, dtype=np.uint8).reshape(4, 8, 3))
    exif = picture.getexif()
    exif[0x0112] = orientation
    data = encode(picture, format_name, exif=exif.tobytes())
    with Image.open(io.BytesIO(data)) as plain:
        expected = ImageOps.exif_transpose(plain).convert("RGB")
    loaded = load_image(ImageRef(data=data))
    assert image_size(ImageRef(data=data)) == loaded.size == expected.size
    assert np.array_equal(np.asarray(loaded), np.asarray(expected))


@pytest.mark.filterwarnings("ignore:.*orrupt EXIF data")
def test_damaged_notes_of_a_camera_do_not_spoil_its_picture():
    data = encode(
        Image.new("RGB", (8, 4)),
        "JPEG",
        exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 9,
    )
    image = ImageRef(data=data)
    check_image(image)
    assert load_image(image).size == image_size(image) == (8, 4)


@pytest.fixture
def server(root):
    files = partial(http.server.SimpleHTTPRequestHandler, directory=root)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_addresses_are_fetched_when_needed(server):
    assert load_image(ImageRef(path=f"{server}/a.jpg")).size == (24, 16)
    with pytest.raises(
        UserError, match=r"image http.*gone\.png cannot be fetched.*404"
    ):
        load_image(ImageRef(path=f"{server}/gone.png"))
