//! Compares the prefixes of a WebTransport session's streams and datagrams: `web.h` and `quic::webtransport`.

use millrace_quic::webtransport::{Begins, Binding};

/// Value of `FRAMES_MAX` in frames.h.
const FRAMES_MAX: usize = 2048;
/// Offset at which a written prefix ends in its buffer, which is also the buffer's length in bytes.
const END: usize = 32;

/// C function that returns the length of the session's prefix at offset `at`, or a negative number if there is none.
type WebEntry = unsafe extern "C" fn(text: *const u8, at: u32, len: u32, session: u64) -> i32;
/// C function that writes the session's prefix so that it ends at `end`, and returns the prefix's length.
type Put = unsafe extern "C" fn(end: *mut u8, session: u64) -> u32;

unsafe extern "C" {
    fn web_native_enter_stream(text: *const u8, at: u32, len: u32, session: u64) -> i32;
    fn web_native_enter_datagram(text: *const u8, at: u32, len: u32, session: u64) -> i32;
    fn web_native_put_stream(end: *mut u8, session: u64) -> u32;
    fn web_native_put_datagram(end: *mut u8, session: u64) -> u32;
    fn web_native_stream_len(session: u64) -> u32;
    fn web_native_datagram_len(session: u64) -> u32;
}

fn enter(with: WebEntry, data: &[u8], at: usize, fill: u8, session: u64) -> Option<usize> {
    let mut text = vec![fill; FRAMES_MAX + 8];
    text[at..at + data.len()].copy_from_slice(data);
    // SAFETY: `text` has the size that frames.h requires, and contains the given range.
    let taken = unsafe { with(text.as_ptr(), at as u32, data.len() as u32, session) };
    usize::try_from(taken).ok()
}

fn put(with: Put, session: u64) -> Vec<u8> {
    let mut text = [0xee; END];
    // SAFETY: the C function writes at most 16 bytes before the pointer, and the buffer has 32.
    let len = unsafe { with(text.as_mut_ptr().add(END), session) } as usize;
    text[END - len..].to_vec()
}

/// Compares both implementations on the start of a stream or datagram. The first 8 bytes are the session's ID, or mean
/// raw QUIC if one of their two highest bits is set. The next byte is the data's offset in its buffer, and another one
/// fills the rest of the buffer.
pub fn kernel_web(data: &[u8]) {
    let Some((session, data)) = data.split_first_chunk() else { return };
    let Some((&[at, fill], data)) = data.split_first_chunk() else { return };
    let place = (usize::from(at), fill);
    let data = &data[..data.len().min(FRAMES_MAX - place.0)];
    let session = u64::from_be_bytes(*session);
    let (session, binding) =
        if session >> 62 == 0 { (session, Binding::Session(session)) } else { (u64::MAX, Binding::Bare) };

    let begins = match binding.begins_uni(data) {
        Begins::Ours(len) => Some(len),
        Begins::Unknown | Begins::Stray(_) | Begins::Http(_) => None,
    };
    assert_eq!(enter(web_native_enter_stream, data, place.0, place.1, session), begins);
    assert_eq!(enter(web_native_enter_datagram, data, place.0, place.1, session), binding.strip(data));
    assert_eq!(put(web_native_put_stream, session), *binding.uni());
    assert_eq!(put(web_native_put_datagram, session), *binding.datagram());
    // SAFETY: the C functions take no pointers.
    let lengths = unsafe { (web_native_stream_len(session), web_native_datagram_len(session)) };
    assert_eq!(lengths, (binding.uni().len() as u32, binding.datagram().len() as u32));
}
