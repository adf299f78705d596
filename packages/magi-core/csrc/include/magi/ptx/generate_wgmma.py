"""Write wgmma_shapes.inc: one C++ specialisation per (element, N) of wgmma.mma_async m64nNk16, SS and RS forms.

PTX wants every accumulator register spelt out, so the text is generated. Run: python generate_wgmma.py
"""

from pathlib import Path

SHAPES = (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
ELEMENTS = {"__nv_bfloat16": "bf16", "__half": "f16"}


def specialisation(element: str, ptx: str, n: int) -> str:
    regs = n // 2
    acc = ", ".join(f"%{i}" for i in range(regs))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(regs))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx}"

    def body(a: str, rest: str, scale: int) -> str:
        return (
            f'        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{scale}, 0;\\n{name} "\n'
            f'        "{{{acc}}}, "\n        "{a}, {rest};\\n}}\\n"\n        : {outs}\n'
        )

    ss = body(f"%{regs}, %{regs + 1}", f"p, 1, 1, %{regs + 3}, %{regs + 4}", regs + 2)
    rs = body(
        "{" + ", ".join(f"%{regs + i}" for i in range(4)) + "}, " + f"%{regs + 4}", f"p, 1, 1, %{regs + 6}", regs + 5
    )
    return f"""template <>
struct Wgmma<{element}, {n}> {{
  template <int kTransA, int kTransB>
  __device__ __forceinline__ static void ss(float (&d)[{regs}], uint64_t a, uint64_t b, int accumulate) {{
    asm volatile(
{ss}        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));
  }}
  template <int kTransB>
  __device__ __forceinline__ static void rs(float (&d)[{regs}], uint32_t const (&a)[4], uint64_t b, int accumulate) {{
    asm volatile(
{rs}        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
  }}
}};
"""


def main() -> None:
    text = "// Written by generate_wgmma.py; included by wgmma.cuh alone.\n"
    for element, ptx in ELEMENTS.items():
        for n in SHAPES:
            text += specialisation(element, ptx, n)
    Path(__file__).with_name("wgmma_shapes.inc").write_text(text)


if __name__ == "__main__":
    main()
