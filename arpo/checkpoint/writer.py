"""Writing distributed checkpoints whose files' sizes and checksums are known without reading them back."""

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
    """torch's writer; `files` are those that this rank has written, as the manifest lists them."""

    def __init__(self, folder: Path):
        super().__init__(folder, sync_files=False)  # torch would do it before the last bytes have left its buffer
        self.fs = MeasuredFiles()
        self.files = self.fs.files

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file of other things beside the tensors."""
        with self.fs.create_stream(self.path / name, "wb") as file:
            file.write(data)


class MeasuredFiles(FileSystem):
    """Flushes each file to disk once it is whole."""

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
    """A file that is written from its beginning to its end."""

    size = checksum = 0

    def write(self, part) -> int:
        self.checksum = zlib.crc32(part, self.checksum)
        self.size += (written := super().write(part))
        return written
