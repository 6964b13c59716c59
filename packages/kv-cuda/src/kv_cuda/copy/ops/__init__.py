"""Operations on the device: the kernel, the driver's batched copies, the checksum."""
