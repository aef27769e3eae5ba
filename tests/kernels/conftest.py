"""Fixtures of the tests of Triton's kernels, which run in Triton's interpreter."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

if importlib.util.find_spec("triton") is None:  # there is no wheel for this machine
    collect_ignore_glob = ["test_triton*.py", "test_gpu_dispatch.py"]


@pytest.fixture
def seeded():
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="module")
def mended_interpreter():
    """Mend two bugs of the interpreter in Triton 3.6, and save most of its time.

    It fails to convert arrays of one element to integers with NumPy 2.4, and it multiplies bfloat16
    matrices as integers of the same bits. It patches the language for each function that a kernel
    calls, and checks all integer arithmetic for overflow in 64 bits; neither is needed.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    assert isinstance(tl.sum, interpreter.InterpretedFunction), (
        "Triton was imported without TRITON_INTERPRET=1: set it for the whole run")
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    patch_all = interpreter._patch_lang

    def once(function):
        if not tl.core.is_builtin(tl.load):
            return interpreter._LangPatchScope()  # for the kernel that calls the function
        return patch_all(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self, a, b, *rest):
        a, b = (x if x.dtype.scalar != tl.bfloat16 or x.data.dtype != numpy.uint16
                else interpreter.TensorHandle(
                    (x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)
                for x in (a, b))
        return dot(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as context:
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        context.setattr(interpreter.interpreter_builder, "options", options)
        context.setattr(interpreter, "_patch_lang", once)
        context.setattr(interpreter, "_patch_lang_tensor", patched)
        context.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
