"""Where buffers live: the processor's memory, or an accelerator's, behind the little that the decode loop needs of either."""

from .accelerator import Accelerator, DeviceArray, Staging
from .host import Array, Call, Device, Host

__all__ = ["Accelerator", "Array", "Call", "Device", "DeviceArray", "Host", "Staging"]
