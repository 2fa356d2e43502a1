"""What reading a pickle looks up."""

import io
import pickle


def names_in_pickle(value):
    """The names of all functions and classes that unpickling a value looks up."""
    names = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            names.add(f"{module}.{name}")
            return super().find_class(module, name)

    assert Reader(io.BytesIO(pickle.dumps(value))).load() == value
    return names
