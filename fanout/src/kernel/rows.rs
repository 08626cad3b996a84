//! An allocator for entries of the kernel's tables of streams and receivers. Freed entries are reused after a second.

use std::time::Duration;

/// Time before freed table entries are reused. It is longer than any run of the BPF program, so that no run still reads
/// an entry that is reused.
const LINGER: Duration = Duration::from_secs(1);

/// The entry of a stream in the kernel's table of streams, and the range of its receivers' entries in the table of
/// receivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRow {
    pub index: u32,
    pub first: u32,
    pub receivers: u32,
}

/// Free and used rows of the kernel's tables. A row is the entry of a stream in the table of streams, together with a
/// range of entries in the table of receivers.
#[derive(Debug)]
pub struct StreamRows {
    streams: u32,
    receivers: u32,
    used: Vec<StreamRow>,
    /// The table entries of closed streams, each with the time when it was freed.
    given_back: Vec<(StreamRow, Duration)>,
}

impl StreamRows {
    /// Creates tables with this many entries, all of them free.
    pub fn new(streams: u32, receivers: u32) -> Self {
        Self { streams, receivers, used: Vec::new(), given_back: Vec::new() }
    }

    /// Allocates the lowest free entry in the table of streams, and the lowest range of `receivers` free entries in the
    /// table of receivers.
    ///
    /// # Errors
    /// Fails if one of the tables has too few free entries. The error has the time until the entries freed last may
    /// be used again, or `None` if all unused entries may be used already.
    pub fn take(&mut self, receivers: u32, now: Duration) -> Result<StreamRow, Option<Duration>> {
        self.given_back.retain(|(_, since)| now < *since + LINGER);
        match self.find(receivers) {
            Some(row) => {
                self.used.push(row);
                Ok(row)
            }
            None => Err(self.given_back.iter().map(|(_, since)| *since + LINGER - now).max()),
        }
    }

    fn taken(&self) -> impl Iterator<Item = &StreamRow> {
        self.used.iter().chain(self.given_back.iter().map(|(row, _)| row))
    }

    fn find(&self, receivers: u32) -> Option<StreamRow> {
        let index = (0..self.streams).find(|index| self.taken().all(|row| row.index != *index))?;
        // The lowest free range begins at 0, or at the end of a used range.
        let ends = self.taken().map(|row| row.first + row.receivers);
        let is_free = |first: &u32| {
            let end = first.saturating_add(receivers);
            end <= self.receivers
                && self.taken().all(|row| end <= row.first || row.first + row.receivers <= *first)
        };
        let first = ends.chain([0]).filter(is_free).min()?;
        Some(StreamRow { index, first, receivers })
    }

    /// Frees the table entries of a stream. They are reused only after a second.
    pub fn give_back(&mut self, index: u32, now: Duration) {
        if let Some(at) = self.used.iter().position(|row| row.index == index) {
            self.given_back.push((self.used.swap_remove(at), now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bpf_map_rows_of_streams_do_not_overlap_and_are_reused_after_1_s() {
        let ms = Duration::from_millis;
        let mut rows = StreamRows::new(3, 10);
        let row = |index, first, receivers| StreamRow { index, first, receivers };
        assert_eq!(rows.take(4, ms(0)), Ok(row(0, 0, 4)));
        assert_eq!(rows.take(4, ms(0)), Ok(row(1, 4, 4)));
        assert_eq!(rows.take(3, ms(0)), Err(None), "of two receivers that are left");
        assert_eq!(rows.take(2, ms(0)), Ok(row(2, 8, 2)));
        rows.give_back(1, ms(100));
        assert_eq!(rows.take(4, ms(100)), Err(Some(ms(1000))), "a run may still read it");
        assert_eq!(rows.take(4, ms(1099)), Err(Some(ms(1))));
        assert_eq!(rows.take(3, ms(1100)), Ok(row(1, 4, 3)));
        assert_eq!(rows.take(1, ms(1100)), Err(None), "no more streams");
        rows.give_back(0, ms(2000));
        rows.give_back(7, ms(2000));
        assert_eq!(rows.take(5, ms(4000)), Err(None), "not in a row");
        assert_eq!(rows.take(4, ms(4000)), Ok(row(0, 0, 4)));
    }
}
