//! A filter for the largest recent value.

/// The largest value of the current and the last `length - 1` periods. A period is a round trip or a cycle, counted by
/// the caller. The filter stores the three values that may still become the largest (Kathleen Nichols' windowed min/max
/// algorithm).
#[derive(Clone, Copy, Debug, Default)]
pub struct WindowedMax {
    best: [FilterSample; 3],
}

#[derive(Clone, Copy, Debug, Default)]
struct FilterSample {
    period: u64,
    value: u64,
}

impl WindowedMax {
    /// Returns the largest value of the recent periods, or 0 if no value was added yet.
    pub fn get(&self) -> u64 {
        self.best[0].value
    }

    /// Adds a value of `period`, and drops values that are `length` or more periods old.
    pub fn update(&mut self, period: u64, length: u64, value: u64) {
        let new = FilterSample { period, value };
        if value >= self.best[0].value || period.saturating_sub(self.best[2].period) >= length {
            self.best = [new; 3];
            return;
        }
        if value >= self.best[1].value {
            self.best[1] = new;
            self.best[2] = new;
        } else if value >= self.best[2].value {
            self.best[2] = new;
        }
        // If the largest value has expired, the second largest replaces it.
        while period.saturating_sub(self.best[0].period) >= length {
            self.best = [self.best[1], self.best[2], new];
            if self.best[0].period == period {
                return;
            }
        }
        // The second largest value has to be from a later period than the largest, and the third from a later period
        // than the second. Otherwise these values would expire together.
        let age = period.saturating_sub(self.best[0].period);
        if self.best[1].period == self.best[0].period && age > length / 4 {
            self.best[1] = new;
            self.best[2] = new;
        } else if self.best[2].period == self.best[1].period && age > length / 2 {
            self.best[2] = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The filter's result is at least the largest value of the current period, and at most the largest of the last
    /// `length` periods.
    #[test]
    fn windowed_max_lies_between_maxima_of_last_period_and_whole_window() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 40
        };
        for length in [1, 2, 10] {
            let mut filter = WindowedMax::default();
            let mut all = Vec::new();
            for period in 0..1000 {
                for _ in 0..random() % 3 + 1 {
                    let value = random() % 1000;
                    filter.update(period, length, value);
                    all.push((period, value));
                    let since = |age: u64| {
                        let kept = all.iter().filter(|(at, _)| period - at < age);
                        kept.map(|(_, value)| *value).max().unwrap_or_default()
                    };
                    assert!(filter.get() <= since(length), "{length} {period}");
                    assert!(filter.get() >= since(1), "{length} {period}");
                }
            }
        }
    }
}
