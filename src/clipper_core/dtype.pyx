"""Element types of rows and predictions. Names here are the names of the public notation: `f32[784]`, `str`, `i64[*]`."""

NAMES = {"bool": BOOL, "u8": U8, "i8": I8, "u16": U16, "i16": I16, "u32": U32, "i32": I32, "u64": U64, "i64": I64,
         "f16": F16, "f32": F32, "f64": F64, "str": STR, "bytes": BYTES}


def item_bytes(int dtype):
    """Bytes of one element of `dtype`; 1 for STR and BYTES. Threads: any."""
    return itemsize(dtype)
