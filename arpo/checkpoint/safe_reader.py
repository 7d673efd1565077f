"""Reading distributed checkpoints that may come from strangers: a checkpoint's file names no code that is run.

torch unpickles a checkpoint's `.metadata` with everything that a pickle can do, and what that calls "bytes" once more.
Here only the classes that describe tensors are known, and each tensor's file must lie in the checkpoint's own folder.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

NOT_TENSORS = "its .metadata holds more than tensors"
KNOWN = {
    *((metadata.__name__, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties")),
    *((metadata.__name__, name) for name in ("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (filesystem.__name__, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""Names in the pickle of a checkpoint of tensors; dtypes besides. Bytes are missing: torch reads them as any pickle."""


class SafeReader(FileSystemReader):
    """torch's reader, but for the unpickling of the metadata. Raises UnpicklingError for what is not of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"{NOT_TENSORS} ({type(found).__name__})")
        if found.storage_meta is None:
            found.storage_meta = metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        for entry in found.storage_data.values():
            if pathlib.PurePath(entry.relative_path).name != entry.relative_path:
                raise pickle.UnpicklingError(f"its .metadata points out of the folder: {entry.relative_path!r}")
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN and not (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            raise pickle.UnpicklingError(f"{NOT_TENSORS} ({module}.{name})")
        return super().find_class(module, name)
