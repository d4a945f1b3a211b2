"""`PsrlCpuPlatform`: SGLang on plain torch kernels and gloo, with the mends of this package."""

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from psrl_sglang.platforms import hooks


class PsrlCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform, because SGLang's own CPU platform requires the AMX build of its kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"  # the default would need a C++ compiler, and seconds of it at the first request

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Refuse to serve unmended; this is the first call that SGLang makes after it applied the hooks."""
        hooks.require_applied()
