"""Pickles that an attacker would write, by name. Most would run something in `pickle.loads`; our reader must not.

`CODE` is what those try: it makes a file, so that a test can prove that nothing was run.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from ucp.errors import IntegrityError, UcpError, UnsafeError


@dataclass(frozen=True)
class Attack:
    """`error` is the class of error that reading raises, or None if the pickle is read as harmless data."""

    name: str
    data: bytes
    error: type[UcpError] | None


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<L", len(raw)) + raw


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, *args: bytes) -> bytes:
    return glob(module, name) + b"(" + b"".join(args) + b"tR"


def attacks(canary: Path) -> list[Attack]:
    """Every attack, each trying to create the file `canary`."""
    command = text(f"touch {canary}")
    code = text(f"open({str(canary)!r}, 'w').close()")
    os_system = glob("os", "system")
    return [
        *_calls(canary, command, code, os_system),
        *_writes_on_stand_ins(command, os_system),
        *_bombs(),
        *_lies(),
        *_disguises(command, code),
    ]


def _disguises(command: bytes, code: bytes) -> list[Attack]:
    """Techniques from collections of malicious models that hide what is called, or call it indirectly."""
    p2, p4 = b"\x80\x02", b"\x80\x04"
    dotted = text("os") + text("path.os.system")
    return [
        Attack("dotted name to another module", p4 + dotted + b"\x93" + command + b"\x85R.", UnsafeError),
        Attack(
            "stack_global of strings put together by the memo",
            p4 + text("system") + b"\x94" + text("os") + b"\x94h\x01h\x00\x93" + command + b"\x85R.",
            UnsafeError,
        ),
        Attack("stack_global of no strings", p4 + b"K\x01K\x02\x93.", IntegrityError),
        Attack("stack_global of bytes", p4 + b"C\x02osC\x06system\x93" + command + b"\x85R.", IntegrityError),
        Attack("full-width letters", p4 + text("ｏｓ") + text("ｓｙｓｔｅｍ") + b"\x93" + command + b"\x85R.", None),
        Attack(
            "a right-to-left mark in a name",
            p4 + text("o\u202es") + text("system") + b"\x93" + command + b"\x85R.",
            None,
        ),
        Attack("a module with a space", p2 + call("os ", "system", command) + b".", None),
        Attack("inst without arguments", b"(ibuiltins\nexec\n.", UnsafeError),
        Attack("obj with keywords by state", p2 + b"(" + glob("subprocess", "Popen") + command + b"o}b.", UnsafeError),
        Attack(
            "newobj_ex of a harmless class with a hook",
            p4 + glob("a", "B") + b")}" + text("__reduce_ex__") + glob("os", "system") + b"s\x92.",
            None,
        ),
        Attack(
            "object.__reduce_ex__",
            p4 + call("builtins", "getattr", glob("builtins", "object"), text("__reduce_ex__")) + b"K\x02\x85R.",
            UnsafeError,
        ),
        Attack(
            "subclasses of object",
            p4 + call("builtins", "getattr", glob("builtins", "object"), text("__subclasses__")) + b")R.",
            UnsafeError,
        ),
        Attack(
            "compile, then exec", p2 + call("builtins", "compile", code, text("x"), text("exec")) + b".", UnsafeError
        ),
        Attack("code object", p2 + call("types", "FunctionType", call("types", "CodeType", code)) + b".", UnsafeError),
        Attack("marshal", p2 + call("marshal", "loads", b"C\x02N.") + b".", UnsafeError),
        Attack("ctypes", p2 + call("ctypes", "CDLL", text("libc.so.6")) + b".", UnsafeError),
        Attack("a socket", p2 + call("socket", "create_connection", text("x")) + b".", UnsafeError),
        Attack("shutil.rmtree", p2 + call("shutil", "rmtree", text("/nowhere")) + b".", UnsafeError),
        Attack("pty.spawn", p2 + call("pty", "spawn", command) + b".", UnsafeError),
        Attack("timeit", p2 + call("timeit", "timeit", code) + b".", UnsafeError),
        Attack("pdb.run", p2 + call("pdb", "run", code) + b".", UnsafeError),
        Attack(
            "asyncio's subprocess",
            p2 + call("asyncio.subprocess", "create_subprocess_shell", command) + b".",
            UnsafeError,
        ),
        Attack("torch's jit", p2 + call("torch.jit", "load", command) + b".", UnsafeError),
        Attack("pip", p2 + call("pip", "main", b"]" + command + b"a") + b".", UnsafeError),
        Attack("a second pickle as a string", p2 + call("pickle", "loads", b"C\x02N.") + b".", UnsafeError),
        Attack(
            "reduce behind a harmless frame",
            p4 + b"\x95\x02" + bytes(7) + b"N0" + call("os", "system", command) + b".",
            UnsafeError,
        ),
    ]


def _calls(canary: Path, command: bytes, code: bytes, os_system: bytes) -> list[Attack]:
    path = text(str(canary))
    p2 = b"\x80\x02"
    return [
        Attack("reduce os.system", p2 + os_system + command + b"\x85R.", UnsafeError),
        Attack("reduce posix.system", p2 + call("posix", "system", command) + b".", UnsafeError),
        Attack("reduce nt.system", p2 + call("nt", "system", command) + b".", UnsafeError),
        Attack("protocol 0", b"cos\nsystem\n(V" + command[5:] + b"\ntR.", UnsafeError),
        Attack("inst", b"(" + command + b"ios\nsystem\n.", UnsafeError),
        Attack("obj", p2 + b"(" + os_system + command + b"o.", UnsafeError),
        Attack("newobj", p2 + glob("subprocess", "Popen") + command + b"\x85\x81.", UnsafeError),
        Attack(
            "newobj_ex",
            b"\x80\x04" + glob("subprocess", "Popen") + b")}" + text("args") + command + b"s\x92.",
            UnsafeError,
        ),
        Attack("stack_global", b"\x80\x04\x8c\x02os\x8c\x06system\x93" + command + b"\x85R.", UnsafeError),
        Attack("eval", p2 + call("builtins", "eval", code) + b".", UnsafeError),
        Attack("exec of python 2", p2 + call("__builtin__", "exec", code) + b".", UnsafeError),
        Attack("open", p2 + call("builtins", "open", path, text("w")) + b".", UnsafeError),
        Attack("io.open", p2 + call("io", "open", path, text("w")) + b".", UnsafeError),
        Attack("__import__", p2 + call("builtins", "__import__", text("os")) + b".", UnsafeError),
        Attack("importlib", p2 + call("importlib", "import_module", text("os")) + b".", UnsafeError),
        Attack("runpy", p2 + call("runpy", "_run_code", code) + b".", UnsafeError),
        Attack("webbrowser", p2 + call("webbrowser", "open", text("file:///")) + b".", UnsafeError),
        Attack("torch.hub", p2 + call("torch.hub", "load", text("a/b")) + b".", UnsafeError),
        Attack("torch.load", p2 + call("torch.serialization", "load", path) + b".", UnsafeError),
        Attack(
            "torch's os",
            p2 + b"\x80\x04" + text("torch.serialization") + text("os.system") + b"\x93" + command + b"\x85R.",
            UnsafeError,
        ),
        Attack("numpy's exec", p2 + call("numpy.testing._private.utils", "runstring", code, b"}") + b".", UnsafeError),
        Attack("pickle in a pickle", p2 + call("_pickle", "loads", b"C\x02N.") + b".", UnsafeError),
        Attack("partial", p2 + call("functools", "partial", os_system, command) + b".", UnsafeError),
        Attack(
            "partial, then called", p2 + call("functools", "partial", glob("a", "b")) + command + b"\x85R.", UnsafeError
        ),
        Attack("map", p2 + call("builtins", "map", os_system, b"]" + command + b"a") + b".", UnsafeError),
        Attack("defaultdict", p2 + call("collections", "defaultdict", os_system) + b".", UnsafeError),
        Attack(
            "getattr of a module", p2 + call("builtins", "getattr", glob("os", "path"), text("os")) + b".", UnsafeError
        ),
        Attack(
            "getattr to globals",
            p2 + call("builtins", "getattr", glob("a", "b"), text("__globals__")) + b".",
            UnsafeError,
        ),
        Attack(
            "getattr through an import",
            p2 + call("builtins", "getattr", glob("torch.serialization", "os"), text("system")) + command + b"\x85R.",
            UnsafeError,
        ),
        Attack(
            "method of an object",
            p2 + call("builtins", "getattr", call("a", "B"), text("run")) + command + b"\x85R.",
            UnsafeError,
        ),
        Attack(
            "methodcaller",
            p2 + call("operator", "methodcaller", text("system"), command) + os_system + b"\x85R.",
            UnsafeError,
        ),
        Attack(
            "newobj by copyreg",
            p2 + call("copyreg", "__newobj__", glob("subprocess", "Popen"), command) + b".",
            UnsafeError,
        ),
        Attack(
            "reconstructor",
            p2
            + call("copyreg", "_reconstructor", glob("subprocess", "Popen"), glob("builtins", "object"), b"N")
            + b".",
            UnsafeError,
        ),
        Attack(
            "tensor rebuilt by os.system",
            p2
            + call(
                "torch._tensor", "_rebuild_from_type_v2", os_system, glob("torch", "Tensor"), command + b"\x85", b"N"
            )
            + b".",
            UnsafeError,
        ),
        Attack(
            "deep inside",
            p2 + b"}" + text("a") + b"](" + b"N}" + text("b") + call("os", "system", command) + b"ses.",
            UnsafeError,
        ),
        Attack(
            "in a persistent id",
            p2 + b"(" + text("storage") + call("os", "system", command) + text("0") + text("cpu") + b"K\x01tQ.",
            UnsafeError,
        ),
        Attack("code behind the stop", p2 + b"N." + call("os", "system", command) + b".", None),
        Attack("named only", p2 + b"]" + os_system + b"a.", None),
        Attack("unknown class", p2 + call("canary_module", "run", command) + b".", None),
        Attack("escape sequences in a name", p2 + call("os", "\x1b]0;owned\x07", command) + b".", UnsafeError),
        Attack("surrogates in a name", b"\x80\x04" + text("os") + text("\ud800") + b"\x93)R.", UnsafeError),
        Attack("null in a name", b"\x80\x04" + text("a\0") + text("b\0c") + b"\x93)R.", None),
    ]


def _writes_on_stand_ins(command: bytes, os_system: bytes) -> list[Attack]:
    p2 = b"\x80\x02"
    hook = b"}" + text("__setstate__") + os_system + b"s"
    reduce_hook = b"}" + text("__reduce__") + os_system + text("__class__") + os_system + b"s"
    return [
        Attack("state with hooks", p2 + call("a", "B") + hook + b"b" + command + b"b.", None),
        Attack("state with hooks in slots", p2 + call("a", "B") + b"N" + hook + b"\x86b" + command + b"b.", None),
        Attack("build on a class", p2 + glob("a", "B") + hook + b"b.", IntegrityError),
        Attack("slots build on a class", p2 + glob("a", "B") + b"N" + hook + b"\x86b.", IntegrityError),
        Attack(
            "build on a form",
            p2 + glob("torch._utils", "_rebuild_tensor_v2") + reduce_hook[:-1] + b"0s0b.",
            IntegrityError,
        ),
        Attack(
            "build on OrderedDict itself",
            p2 + glob("collections", "OrderedDict") + b"N" + hook + b"\x86b.",
            IntegrityError,
        ),
        Attack(
            "build on a dtype",
            p2 + glob("torch", "float32") + b"(" + text("int8") + b"K\x01" + text("int") + b"Nlb.",
            IntegrityError,
        ),
        *_builds_on_references(),
        Attack("append to a class", p2 + glob("a", "B") + b"Na.", IntegrityError),
        Attack("appends to a class", p2 + glob("a", "B") + b"(NNe.", IntegrityError),
        Attack("setitem on a class", p2 + glob("a", "B") + text("x") + b"Ns.", IntegrityError),
        Attack("additems to a class", b"\x80\x04" + glob("a", "B") + b"(N\x90.", IntegrityError),
        Attack("append to a dtype", p2 + glob("torch", "float32") + b"Na.", IntegrityError),
    ]


def _builds_on_references() -> list[Attack]:
    """Values of ucp that a file can reach are as immutable as its own stand-ins."""
    storage = b"(" + text("storage") + glob("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
    tensor = call("torch._utils", "_rebuild_tensor", storage, b"K\x00", b"K\x04\x85", b"K\x01\x85")
    scalar = call(
        "numpy.core.multiarray",
        "scalar",
        call("numpy", "dtype", text("f4")),
        call("_codecs", "encode", text("1234"), text("latin1")),
    )
    listed = b"(" + text("x") * 9 + b"l"
    fields = b"}" + text("offset") + b"K\x63s"
    return [
        Attack(f"build on a {name} from {what}", b"\x80\x02" + value + state + b"b.", IntegrityError)
        for name, value in (
            ("storage", storage),
            ("tensor", tensor),
            ("scalar", scalar),
            ("size", call("torch", "Size", b")")),
        )
        for what, state in (("a list", listed), ("a dict", fields), ("slots", b"N" + fields + b"\x86"))
    ]


def _bombs() -> list[Attack]:
    p2 = b"\x80\x02"
    doubled = b"".join(b"h" + bytes([i]) * 1 + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60))
    dup = b"2\x86" * 60
    large = (
        text("x" * 4096)
        + b"q\x010"
        + b"("
        + (glob("_codecs", "encode") + b"h\x01" + text("latin1") + b"\x86R") * 5000
        + b"l."
    )
    return [
        Attack("memo bomb", p2 + b"Nr\xff\xff\xff\x7f.", UnsafeError),
        Attack("memo bomb behind a string", p2 + text("x") + b"r\xff\xff\xff\xff.", UnsafeError),
        Attack("memo bomb behind a tuple", p2 + b")\x85r\xff\xff\xff\x7f.", UnsafeError),
        Attack("memo bomb in digits", b"Np4000000000\n.", UnsafeError),
        Attack("memo slot of many digits", b"Np" + b"9" * 100_000 + b"\n.", IntegrityError),
        Attack("tuples that double", p2 + b"}N\x85q\x00" + doubled + b"Ns.", UnsafeError),
        Attack("tuples that double by DUP", p2 + b"})" + dup + b"Ns.", UnsafeError),
        Attack(
            "tuples that double, memoized",
            b"\x80\x04}N\x85\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(60)) + b"Ns.",
            UnsafeError,
        ),
        Attack(
            "tuples that double under other names",
            p2 + b"}N\x85q\x00" + b"".join(b"h%ch%c\x86(uq%c" % (i, i, i + 1) for i in range(60)) + b"Ns.",
            UnsafeError,
        ),
        Attack(
            "frozensets that double",
            b"\x80\x04](N\x91\x94" + b"".join(b"(h%cK\x01\x86h%cK\x02\x86\x91\x94" % (i, i) for i in range(60)) + b"e.",
            UnsafeError,
        ),
        Attack(
            "a wide tuple as key, often",
            p2 + b"}((" + b"K\x01" * 50_000 + b"tq\x00N" + b"h\x00N" * 50_000 + b"u.",
            UnsafeError,
        ),
        Attack("deep tuples as key", p2 + b"})" + b"\x85" * 300_000 + b"Ns.", UnsafeError),
        Attack("deep tuples by marks", p2 + b"}" + b"(" * 300_000 + b"t" * 300_000 + b"Ns.", UnsafeError),
        Attack("copies without end", p2 + large, IntegrityError),
        Attack("an integer of many digits", b"I" + b"9" * 200_000 + b"\n.", UnsafeError),
        Attack("a long of many digits", b"L" + b"9" * 200_000 + b"L\n.", UnsafeError),
        Attack(
            "an integer of many bytes",
            p2 + b"\x8b" + struct.pack("<L", 1 << 20) + b"\x01" * (1 << 20) + b".",
            UnsafeError,
        ),
        Attack("a global of many letters", p2 + glob("a" * 100_000, "b") + b".", IntegrityError),
        Attack("globals without end", p2 + b"".join(glob("a", str(i)) for i in range(10_001)) + b".", IntegrityError),
        Attack("deep lists", p2 + b"]" * 200_000 + b"a" * 199_999 + b".", None),
    ]


def _lies() -> list[Attack]:
    p2 = b"\x80\x02"
    storage = b"(" + text("storage") + glob("torch", "FloatStorage") + text("0") + text("cpu")
    tensor = glob("torch._utils", "_rebuild_tensor_v2") + b"("
    return [
        Attack("empty", b"", IntegrityError),
        Attack("no stop", p2 + b"N", IntegrityError),
        Attack("stop of nothing", p2 + b".", IntegrityError),
        Attack("unknown opcode", p2 + b"\xff.", IntegrityError),
        Attack("unknown protocol", b"\x80\x09N.", IntegrityError),
        Attack("extension 1", p2 + b"\x82\x01.", UnsafeError),
        Attack("extension 2", p2 + b"\x83\x01\x00.", UnsafeError),
        Attack("extension 4", p2 + b"\x84\x01\x00\x00\x00.", UnsafeError),
        Attack("out-of-band buffer", b"\x80\x05\x97.", IntegrityError),
        Attack("string past the end", p2 + b"X\xff\xff\xff\x7fabc.", IntegrityError),
        Attack("short string past the end", p2 + b"X\xf0\x00\x00\x00abc.", IntegrityError),
        Attack("negative string", p2 + b"T\xff\xff\xff\xffabc.", IntegrityError),
        Attack("bytes past the end", b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", IntegrityError),
        Attack("bytearray past the end", b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x40abc.", IntegrityError),
        Attack("frame past the end", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", IntegrityError),
        Attack("underflow", p2 + b"R.", IntegrityError),
        Attack("underflow below a mark", p2 + b"N(a.", IntegrityError),
        Attack("mark that is not there", p2 + b"Nt.", IntegrityError),
        Attack("memo that is not there", p2 + b"h\x05.", IntegrityError),
        Attack("unhashable key", p2 + b"}]Ns.", IntegrityError),
        Attack("call of a number", p2 + b"K\x01)R.", IntegrityError),
        Attack("newobj of an object", p2 + call("a", "B") + b")\x81.", IntegrityError),
        Attack("text as persistent id", b"Pabc\n.", None),
        Attack("persistent id of a list", p2 + b"](NeQ.", None),
        Attack(
            "storage of an unknown class",
            p2 + b"(" + text("storage") + glob("a", "B") + text("0") + text("cpu") + b"K\x01tQ.",
            None,
        ),
        Attack(
            "storage of a class that is none",
            p2 + b"(" + text("storage") + b"]" + text("0") + text("cpu") + b"K\x01tQ.",
            None,
        ),
        Attack("storage of text size", p2 + storage + text("many") + b"tQ.", None),
        Attack("storage of negative size", p2 + storage + b"J\xff\xff\xff\xfftQ.", None),
        Attack("tensor of no storage", p2 + tensor + b"NK\x00)))N)tR.", None),
        Attack(
            "tensor of negative shape",
            p2 + tensor + storage + b"K\x04tQK\x00J\xff\xff\xff\xff\x85K\x01\x85\x89NtR.",
            IntegrityError,
        ),
        Attack(
            "tensor of text shape",
            p2 + tensor + storage + b"K\x04tQK\x00" + text("x") + b"\x85K\x01\x85\x89NtR.",
            IntegrityError,
        ),
        Attack(
            "tensor of too many dimensions",
            p2 + tensor + storage + b"K\x04tQK\x00(" + b"K\x01" * 100 + b"t(" + b"K\x01" * 100 + b"t\x89NtR.",
            IntegrityError,
        ),
        Attack(
            "numpy array built twice",
            p2
            + call("numpy.core.multiarray", "_reconstruct", glob("numpy", "ndarray"), b")", b"N")
            + (b"(K\x01)" + call("numpy", "dtype", text("f8")) + b"\x89C\x00tb") * 2
            + b".",
            IntegrityError,
        ),
        Attack(
            "numpy array of lies",
            p2 + call("numpy.core.multiarray", "_reconstruct", glob("numpy", "ndarray"), b")", b"N") + b"}b.",
            IntegrityError,
        ),
    ]
