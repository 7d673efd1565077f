"""Write distributed checkpoints, and measure sizes and checksums of the files meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

import arpo.checkpoint.manifest as manifest


class MeasuredWriter(FileSystemWriter):
    """torch's writer with a list `files` of the files written by this rank, in the manifest's form."""

    def __init__(self, folder: Path):
        # torch would sync a file before its last bytes have left the buffer. MeasuredFiles syncs it after closing.
        super().__init__(folder, sync_files=False)
        self.fs = MeasuredFiles()
        self.files = self.fs.files

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file without tensors."""
        with self.fs.create_stream(self.path / name, "wb") as file:
            file.write(data)


class MeasuredFiles(FileSystem):
    """Flushes each finished file to disk, and records its size and checksum."""

    def __init__(self) -> None:
        self.files: manifest.Files = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with MeasuredFile(io.FileIO(path, mode)) as file:
            yield file
        manifest.sync(Path(path))
        self.files[Path(path).name] = [file.size, file.checksum]

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class MeasuredFile(io.BufferedWriter):
    """A file that is written once, from start to end."""

    size = 0
    checksum = 0

    def write(self, data) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        num_written = super().write(data)
        self.size += num_written
        return num_written
