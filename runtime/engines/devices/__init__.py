"""Memory for buffers, on the host or on an accelerator, with the few operations that the decode loop needs."""

from .accelerator import Accelerator, DeviceArray, Staging
from .host import Array, Call, Device, Host, require_buffers

__all__ = ["Accelerator", "Array", "Call", "Device", "DeviceArray", "Host", "Staging", "require_buffers"]
