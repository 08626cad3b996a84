//! Compares the parser of the TCP option for grafts (`graft_option.h`) with the format in
//! `docs/notes/design/0012-graft.md`.

unsafe extern "C" {
    fn graft_native_read(found: *const u8, bytes: u32) -> i32;
}

/// Copy of C's `enum graft_reading`.
#[derive(Debug, PartialEq, Eq)]
enum GraftReadingCopy {
    None,
    Bad,
    Other,
    Ok,
}

const EXID: &[u8] = b"MRg1";
const BYTES: usize = 12;

/// Compares both parsers on a TCP option. The kernel passes at most one byte more than a valid option has, so that the
/// parser notices a longer one.
pub fn kernel_graft(data: &[u8]) {
    let found = &data[..data.len().min(BYTES + 1)];
    // SAFETY: the length is that of `found`, and the C function reads at most `BYTES` bytes of it.
    let read = unsafe { graft_native_read(found.as_ptr(), found.len() as u32) };
    let reading = expected(found);
    assert_eq!(read, reading as i32, "{found:?}");
}

fn expected(found: &[u8]) -> GraftReadingCopy {
    let [kind, length, ..] = found else {
        return if found.is_empty() { GraftReadingCopy::None } else { GraftReadingCopy::Bad };
    };
    if found.len() < 8 || *kind != 253 || *length < 8 {
        return GraftReadingCopy::Bad;
    }
    match (&found[2..6] == EXID, found[6], found[7]) {
        (false, ..) => GraftReadingCopy::None,
        (true, version, _) if version != 1 => GraftReadingCopy::Other,
        (true, _, 1..=4) if found.len() == BYTES && usize::from(*length) == BYTES => GraftReadingCopy::Ok,
        _ => GraftReadingCopy::Bad,
    }
}
