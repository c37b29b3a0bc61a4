"""DirectFile: a file that is written past the cache of the system, which gigabytes would fill."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

BUFFER_BYTES = 4 * 2**20


class DirectFile:
    """A file that is written in order, while the next bytes are made. It takes the place of a Python file in pyarrow.

    Written past the cache (O_DIRECT), or through it where the file system does not know that.
    """

    def __init__(self, path: Path) -> None:
        self.closed = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._set_direct(True)
        # One buffer is filled while the other is written. Memory of a mapping begins at a page, as O_DIRECT asks for.
        self._buffers = [memoryview(mmap.mmap(-1, BUFFER_BYTES)) for _ in range(2)]
        self._filled = self._written = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vembed-write")
        self._writing: Future[None] | None = None

    def write(self, data: bytes) -> int:
        """Write bytes. An error of the disk may be that of the bytes before."""
        more = memoryview(data).cast("B")
        done = 0
        while done < len(more):
            size = min(len(more) - done, BUFFER_BYTES - self._filled)
            self._buffers[0][self._filled : self._filled + size] = more[
                done : done + size
            ]
            done, self._filled = done + size, self._filled + size
            if self._filled == BUFFER_BYTES:
                self._wait()
                self._writing = self._pool.submit(self._write_all, self._buffers[0])
                self._buffers.reverse()
                self._filled, self._written = 0, self._written + BUFFER_BYTES
        return len(more)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._written + self._filled

    def flush(self) -> None:
        """Do nothing: bytes are written when a buffer is full, and by `close`."""

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self.closed:
            return
        try:
            self._wait()
            self._set_direct(
                False
            )  # the end of the file may be in the middle of a block
            self._write_all(self._buffers[0][: self._filled])
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without what is left."""
        if not self.closed:
            self.closed = True
            self._pool.shutdown()
            os.close(self._file)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write_all(self, data: memoryview) -> None:
        while len(data):
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._set_direct(False)

    def _set_direct(self, is_direct: bool) -> None:
        """Set O_DIRECT where the system and the file system have it."""
        self._is_direct = is_direct and hasattr(os, "O_DIRECT")
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(
                self._file,
                fcntl.F_SETFL,
                flags | flag if self._is_direct else flags & ~flag,
            )
        except OSError:
            self._is_direct = False
