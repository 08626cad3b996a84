//! A limit for reports of receivers that are passed on to the sender.

/// Number of reports that were passed on to the sender in one second: the reports of one receiver, or of all receivers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reports {
    second: u64,
    count: u32,
}

impl Reports {
    fn in_second(&mut self, second: u64) -> &mut u32 {
        if self.second != second {
            *self = Self { second, count: 0 };
        }
        &mut self.count
    }
}

/// Returns whether one more report may be passed on in this second, and counts it. Half of the `most` reports per
/// second go to whichever receivers report first. The other half is shared evenly among `receivers`, so that a receiver
/// that reports all the time does not keep others' reports from the sender. If the stream has only one receiver, all
/// `most` reports may come from it.
pub fn take(all: &mut Reports, own: &mut Reports, second: u64, most: u32, receivers: usize) -> bool {
    let first = most.div_ceil(2);
    let share = match u32::try_from(receivers).unwrap_or(u32::MAX) {
        0 | 1 => most,
        receivers => (most - first).div_ceil(receivers),
    };
    let all = all.in_second(second);
    let own = own.in_second(second);
    let may = *all < most && (*all < first || *own < share);
    if may {
        (*all, *own) = (*all + 1, *own + 1);
    }
    may
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receiver_flooding_rtcp_reports_leaves_other_receivers_their_quota() {
        let mut all = Reports::default();
        let mut loud = Reports::default();
        let mut quiet = [Reports::default(); 20];
        for second in 1..4 {
            let passed = (0..1000).filter(|_| take(&mut all, &mut loud, second, 100, 21)).count();
            assert_eq!(passed, 50, "it had half of them before the others came");
            for one in &mut quiet {
                assert!(take(&mut all, one, second, 100, 21) && take(&mut all, one, second, 100, 21));
            }
            let passed = (0..1000).filter(|_| take(&mut all, &mut loud, second, 100, 21)).count();
            assert_eq!(passed, 0);
        }
    }

    #[test]
    fn rtcp_report_limit_is_divided_among_receivers() {
        let mut all = Reports::default();
        let mut one = Reports::default();
        assert_eq!((0..200).filter(|_| take(&mut all, &mut one, 1, 7, 1)).count(), 7);
        assert_eq!((0..200).filter(|_| take(&mut all, &mut one, 2, 0, 1)).count(), 0);
        let mut many = [Reports::default(); 500];
        assert_eq!(
            many.iter_mut().map(|one| usize::from(take(&mut all, one, 3, 100, 500))).sum::<usize>(),
            100
        );
    }
}
