"""Raising a flag in host memory behind everything that the program wrote before."""

import triton
import triton.language as tl

_STORE = """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.u32 [$1], $2;
    mov.u32 $0, 0;
}"""
STORE = tl.constexpr(_STORE)


@triton.jit
def publish(word, value, COMPILED: tl.constexpr):
    """Stores ``value`` (int32) at ``word``, once, visible to the CPU only behind the whole program's earlier stores.

    A store with release, not an exchange: atomic operations on host memory are not defined across PCIe. The barrier
    puts all threads' stores before the one thread's release. ``COMPILED`` is False in Triton's interpreter.
    """
    tl.debug_barrier()
    if COMPILED:
        tl.inline_asm_elementwise(STORE, "=r,l,r", [word.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_xchg(word, value, sem="release", scope="sys")
