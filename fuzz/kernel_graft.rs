//! TCP's option of grafts: `graft_option.h` against what `docs/design/0012-graft.md` says of its form.

unsafe extern "C" {
    fn graft_native_read(found: *const u8, bytes: u32) -> i32;
}

/// `enum graft_reading`.
#[derive(Debug, PartialEq, Eq)]
enum Reading {
    None,
    Bad,
    Other,
    Ok,
}

const EXID: &[u8] = b"MRg1";
const BYTES: usize = 12;

/// What the kernel hands on: at most one byte more than the option has, which says that it was longer.
pub fn kernel_graft(data: &[u8]) {
    let found = &data[..data.len().min(BYTES + 1)];
    // SAFETY: as many bytes as it is told; it reads no more than `BYTES` of them.
    let read = unsafe { graft_native_read(found.as_ptr(), found.len() as u32) };
    let reading = expected(found);
    assert_eq!(read, reading as i32, "{found:?}");
}

fn expected(found: &[u8]) -> Reading {
    let [kind, length, ..] = found else {
        return if found.is_empty() { Reading::None } else { Reading::Bad };
    };
    if found.len() < 8 || *kind != 253 || *length < 8 {
        return Reading::Bad;
    }
    match (&found[2..6] == EXID, found[6], found[7]) {
        (false, ..) => Reading::None,
        (true, version, _) if version != 1 => Reading::Other,
        (true, _, 1..=4) if found.len() == BYTES && usize::from(*length) == BYTES => Reading::Ok,
        _ => Reading::Bad,
    }
}
