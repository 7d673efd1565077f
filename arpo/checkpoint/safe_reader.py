"""Read distributed checkpoints that may come from strangers, without running code from them.

torch unpickles a checkpoint's `.metadata` without limits, and objects of the kind "bytes" a second time. This reader
accepts only the classes that describe tensors, and only tensor files within the checkpoint's folder.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

NOT_TENSORS = "its .metadata holds more than tensors"
ALLOWED = {
    *((metadata.__name__, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties")),
    *((metadata.__name__, name) for name in ("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (filesystem.__name__, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""Allowed names in a `.metadata` pickle, besides dtypes. Objects of the kind "bytes" are not allowed, since torch would
unpickle them without limits."""


class SafeReader(FileSystemReader):
    """torch's reader with a safe unpickler for the metadata. Raises UnpicklingError for anything but tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            loaded = _Unpickler(file).load()
        if not isinstance(loaded, metadata.Metadata):
            raise pickle.UnpicklingError(f"{NOT_TENSORS} ({type(loaded).__name__})")
        if loaded.storage_meta is None:
            loaded.storage_meta = metadata.StorageMeta()
        loaded.storage_meta.load_id = self.load_id
        for storage in loaded.storage_data.values():
            if pathlib.PurePath(storage.relative_path).name != storage.relative_path:
                raise pickle.UnpicklingError(f"its .metadata points out of the folder: {storage.relative_path!r}")
        return loaded


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 alone has the classes of pathlib there (python/cpython 133789).
        module = module.replace("pathlib._local", "pathlib")
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{NOT_TENSORS} ({module}.{name})")
        return super().find_class(module, name)
