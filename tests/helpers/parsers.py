"""The parsers of the configs, each made once."""

from unittest import mock

from tyro._parsers import ParserSpecification


def parsers_kept():
    """tyro builds the parser of a config's class anew at each call, which is most of the tenth of a second it takes."""
    build, built = ParserSpecification.from_callable_or_type, {}

    def once(root, markers, description, parent_classes, *args, **settings):
        if parent_classes:  # a section
            return build(root, markers, description, parent_classes, *args, **settings)
        if root not in built:
            built[root] = build(root, markers, description, parent_classes, *args, **settings)
        return built[root]

    return mock.patch.object(ParserSpecification, "from_callable_or_type", staticmethod(once))
