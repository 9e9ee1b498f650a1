"""Globals that no legitimate checkpoint calls: those that run code or access files, processes or the network.

Nothing in a file is ever called, so these are harmless here. But a checkpoint that *tries* to call one is an attack or
was made for one, and the user must be told. The list does not have to be complete for safety: it only decides between
an error and a stand-in that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Packages without any data types.
_PACKAGES: Final = frozenset(
    {
        *("os", "posix", "nt", "sys", "subprocess", "_posixsubprocess", "pty", "shutil", "commands", "popen2"),
        *("_winapi", "importlib", "_frozen_importlib", "_frozen_importlib_external", "imp", "_imp", "runpy"),
        *("pkgutil", "zipimport"),
        *("pickle", "_pickle", "cPickle", "marshal", "shelve", "joblib", "ctypes", "_ctypes", "cffi", "mmap", "gc"),
        *("socket", "_socket", "socketserver", "ssl", "http", "urllib", "urllib2", "urllib3", "requests", "httpx"),
        *("ftplib", "smtplib", "telnetlib", "poplib", "imaplib", "nntplib", "xmlrpc", "webbrowser", "paramiko"),
        *("threading", "_thread", "multiprocessing", "asyncio", "sched", "atexit", "faulthandler", "resource"),
        *("fcntl", "winreg"),
        *("pdb", "bdb", "codeop", "cProfile", "timeit", "doctest", "pydoc", "linecache", "rlcompleter", "idlelib"),
        *("pip", "ensurepip", "venv", "setuptools", "distutils", "pkg_resources", "compileall", "py_compile", "site"),
        *("io", "_io", "tempfile", "fileinput", "glob", "tarfile", "zipfile", "sqlite3", "_sqlite3", "antigravity"),
    }
)

# Dangerous names in modules that also have data types; "*" is every name, including those of submodules.
_NAMES: Final[dict[str, frozenset[str]]] = {
    "builtins": frozenset(
        {
            *("eval", "exec", "execfile", "compile", "__import__", "__build_class__", "reload", "apply", "breakpoint"),
            *("open", "file", "input", "raw_input", "print", "exit", "quit", "help"),
            *("setattr", "delattr", "globals", "locals", "vars"),
        }
    ),
    "code": frozenset({"interact", "compile_command", "InteractiveConsole", "InteractiveInterpreter"}),
    "codecs": frozenset({"open"}),
    "logging.config": frozenset({"*"}),
    "numpy": frozenset({"load", "save", "savez", "fromfile", "memmap", "loadtxt", "savetxt", "genfromtxt"}),
    "numpy.distutils": frozenset({"*"}),
    "numpy.f2py": frozenset({"*"}),
    "numpy.testing": frozenset({"*"}),
    "pandas": frozenset({"eval", "read_pickle"}),
    "pandas.io.pickle": frozenset({"*"}),
    "platform": frozenset({"popen", "_syscmd_file", "_syscmd_ver"}),
    "profile": frozenset({"run", "runctx", "Profile"}),
    "signal": frozenset({"signal", "alarm", "setitimer", "raise_signal", "pthread_kill"}),
    "torch": frozenset({"load", "save", "compile"}),
    "torch._inductor": frozenset({"*"}),
    "torch.classes": frozenset({"load_library"}),
    "torch.distributed.rpc": frozenset({"*"}),
    "torch.hub": frozenset({"*"}),
    "torch.jit": frozenset({"load", "CompilationUnit"}),
    "torch.ops": frozenset({"load_library"}),
    "torch.package": frozenset({"*"}),
    "torch.serialization": frozenset({"load", "save", "_load", "_legacy_load"}),
    "torch.utils.cpp_extension": frozenset({"*"}),
    "torch.utils.model_zoo": frozenset({"*"}),
    "trace": frozenset({"Trace"}),
    "transformers.dynamic_module_utils": frozenset({"*"}),
    "types": frozenset({"CodeType", "FunctionType", "LambdaType", "MethodType"}),
}
_WHOLE_MODULES: Final = tuple(module for module, names in _NAMES.items() if "*" in names)

# Plain records in the packages above that legitimate programs do save.
_DATA: Final = frozenset(
    {
        *(("os", "stat_result"), ("posix", "stat_result"), ("os", "terminal_size"), ("posix", "uname_result")),
        *(("io", "BytesIO"), ("_io", "BytesIO"), ("io", "StringIO"), ("_io", "StringIO")),
        *(("urllib.parse", "ParseResult"), ("urllib.parse", "SplitResult")),
    }
)

# Functions that call their arguments: harmless with a class, an attack with a dangerous argument.
CALLERS: Final = frozenset(
    {
        *("functools.partial", "functools.partialmethod", "functools.reduce", "builtins.map", "builtins.filter"),
        *("itertools.starmap", "itertools.accumulate", "itertools.takewhile", "itertools.dropwhile", "operator.call"),
        *("collections.defaultdict", "torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2"),
        *("torch._utils._rebuild_wrapper_subclass", "weakref.finalize"),
    }
)
# Functions that return a deferred call: harmless to store, an attack if the pickle calls the result.
DEFERRED_CALLS: Final = frozenset(
    {
        *("functools.partial", "functools.partialmethod", "builtins.getattr", "operator.attrgetter"),
        *("operator.methodcaller", "operator.itemgetter"),
    }
)

# The Python 3 names of Python 2 modules, and the public names of C modules.
MODERN_MODULES: Final = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "_functools": "functools",
    "_operator": "operator",
}


def is_dangerous(module: str, qualname: str) -> bool:
    """Whether calling `qualname` of `module` would run code or access files, processes or the network."""
    module = MODERN_MODULES.get(module, module)
    parts = qualname.split(".")
    if (module, qualname) in _DATA:
        return False
    if module.split(".", 1)[0] in _PACKAGES or parts[0] in _NAMES.get(module, ()):
        return True
    if any(module == whole or module.startswith(whole + ".") for whole in _WHOLE_MODULES):
        return True
    # Reached through a module that imports it (`torch.serialization` + `os.system`) or through `f.__globals__`.
    inner = parts if len(parts) > 1 else []
    return any(part in _PACKAGES for part in parts[:-1]) or any(n.startswith("__") and n.endswith("__") for n in inner)


def suspicious(names: Iterable[tuple[str, str]]) -> list[str]:
    """The dangerous ones among the globals (module, qualname) that a pickle names, as sorted dotted paths."""
    return sorted(f"{module}.{qualname}" for module, qualname in set(names) if is_dangerous(module, qualname))
