"""The parsers of the configs, each made once."""

import contextlib
import inspect
from dataclasses import replace
from unittest import mock


def parsers_kept():
    """tyro builds the parser of a config's class anew at each call, which is most of the tenth of a second it takes.

    Does nothing without tyro: the tests for a GPU need no config file, and must run on a host that lacks the package.
    """
    try:
        from tyro._parsers import ParserSpecification
    except ModuleNotFoundError:
        return contextlib.nullcontext()
    build, built = ParserSpecification.from_callable_or_type, {}

    def once(root, markers, description, parent_classes, *args, **settings):
        if parent_classes:  # a section
            return build(root, markers, description, parent_classes, *args, **settings)
        name = inspect.getfile(root.__origin__), root.__origin__.__qualname__  # a script's is of __main__, too
        if name not in built:
            built[name] = build(root, markers, description, parent_classes, *args, **settings)
        return replace(built[name], f=root)

    return mock.patch.object(ParserSpecification, "from_callable_or_type", staticmethod(once))
