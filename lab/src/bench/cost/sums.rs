//! Adds up everything that the observer reports of the kernel's time on a CPU, and compares the sum with a clock.
//!
//! The clock is independent of the observer and of samples: a BPF program reads it at task switches. It does not tell
//! kernel from user mode, so user mode is taken from `perf`, and not from the observer. If the observer took kernel
//! stacks for user mode or the other way round, its own figure would hide this.
//!
//! The interrupts of the sampling clocks need no correction. A timed event and the clock's busy time include those that
//! interrupt them. A sample stands for a whole sampling interval, which includes its interrupt.

use millrace_cost::report::CpuCost;
use serde::Serialize;

use super::profile::CpuSamples;

/// Largest difference between the observer's sum and the clock that counts as accurate, in percentage points of one
/// CPU.
pub const AIM_POINTS: f64 = 1.0;

/// The kernel's time on one CPU by the observer and by the clock, percent of the CPU's time.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct KernelSum {
    pub cpu: u32,
    /// Time of all events (kernel contexts such as NET_RX) that BPF programs timed, including the observer's own time
    /// in them.
    timed_pct: f64,
    /// Time of all other kernel work, which the observer estimates from samples, including its own.
    sampled_pct: f64,
    /// Time of the events of `timed_pct`, but estimated from the observer's samples in them. If bursts of work are in
    /// step with the sampling clock, the estimate differs from `timed_pct` by more than its standard error. Sampled
    /// times of user mode and of other kernel work then have a similar error.
    timed_by_samples_pct: f64,
    /// Part of `timed_pct` and `sampled_pct` that is the time of the observer itself.
    observer_pct: f64,
    /// Time outside of the idle task by the clock.
    clock_busy_pct: f64,
    /// Time in user mode by `perf`.
    user_pct: f64,
    /// Time that a hypervisor gave to other virtual machines. The clock and timed events include it, and samples do
    /// not.
    steal_pct: f64,
    /// The sum by the observer, `timed_pct` plus `sampled_pct`, minus the kernel's time by the clock, `clock_busy_pct`
    /// minus `user_pct`.
    pub difference_points: f64,
    /// Standard error of `difference_points` by the numbers of samples of the observer and of `perf`.
    pub standard_error_points: f64,
}

impl KernelSum {
    /// Adds up a CPU's times. The report must have [`Event::Kernel`](millrace_cost::report::Event::Kernel). `busy_pct`
    /// is the CPU's busy time by the clock, and `hz` the observer's sampling rate.
    pub fn new(cpu: &CpuCost, profile: &CpuSamples, busy_pct: f64, hz: u32, period_ns: u64) -> Self {
        let percent = |ns: u64| ns as f64 * 100.0 / period_ns.max(1) as f64;
        let due = (period_ns as f64 / 1e9 * f64::from(hz)).max(1.0);
        let sum_pct = percent(cpu.events.iter().map(|of| of.ns + of.observer_ns).sum());
        let sampled_pct = cpu.events.iter().map(|of| match of.calls {
            // Some calls in a timed kernel context are not timed by any BPF program, and are counted by samples.
            Some(_) => of.sampled as f64 * 100.0 / due,
            None => percent(of.ns + of.observer_ns),
        });
        let sampled_pct: f64 = sampled_pct.sum();
        // Samples that hit the observer's own programs are not counted in `samples`, so they are added in proportion.
        let timed_samples = cpu.events.iter().filter(|of| of.calls.is_some()).map(|of| {
            let outside_programs = (of.samples - of.sampled) as f64;
            outside_programs * (of.ns + of.observer_ns) as f64 / of.ns.max(1) as f64
        });
        let timed_by_samples_pct = timed_samples.sum::<f64>() * 100.0 / due;
        // It is unknown in which mode the samples would have been that a CPU missed, for example in stolen time. So the
        // user time is the profile's share of user mode, multiplied by the busy time.
        let busy = profile.busy().max(1) as f64;
        let user = profile.user as f64 / busy;
        let user_pct = user * busy_pct;
        let variance = sampled_pct * (100.0 - sampled_pct).max(0.0) / due
            + busy_pct * busy_pct * user * (1.0 - user) / busy;
        Self {
            cpu: cpu.cpu,
            timed_pct: sum_pct - sampled_pct,
            sampled_pct,
            timed_by_samples_pct,
            observer_pct: percent(cpu.events.iter().map(|of| of.observer_ns).sum()),
            clock_busy_pct: busy_pct,
            user_pct,
            steal_pct: percent(cpu.procstat.steal_ns),
            difference_points: sum_pct - (busy_pct - user_pct),
            standard_error_points: variance.sqrt(),
        }
    }

    /// Reports whether the observer's sum differs from the clock by at most [`AIM_POINTS`].
    pub fn meets_aim(&self) -> bool {
        self.difference_points.abs() <= AIM_POINTS
    }

    /// Reports whether the observer's sum differs from the clock by at most [`AIM_POINTS`], or by no more than the
    /// finite numbers of samples explain.
    pub fn is_within(&self) -> bool {
        self.difference_points.abs() <= AIM_POINTS.max(3.0 * self.standard_error_points)
    }
}

#[cfg(test)]
mod tests {
    use millrace_cost::report::{Event, EventCost, ProcStat};

    use super::*;

    impl KernelSum {
        pub fn with_difference(difference_points: f64, standard_error_points: f64) -> Self {
            let cpu = CpuCost::default();
            let sum = Self::new(&cpu, &profile(0, 1), 0.0, 1000, 1);
            Self { difference_points, standard_error_points, ..sum }
        }
    }

    fn profile(user: u64, rest: u64) -> CpuSamples {
        let mut profile = CpuSamples::new(2000);
        (profile.user, profile.rest) = (user, rest);
        profile
    }

    fn cost(event: Event, [ns, observer_ns]: [u64; 2], calls: Option<u64>, samples: [u64; 2]) -> EventCost {
        let [samples, sampled] = samples;
        EventCost {
            event,
            ns,
            share: 0.0,
            calls,
            observer_ns,
            samples,
            sampled,
            interval: None,
            parts: Vec::new(),
        }
    }

    /// In a period of one second, the CPU spends 300 ms in user mode and 330 ms in the kernel. BPF programs time 220 ms
    /// of the kernel's time.
    #[test]
    fn sum_of_kernel_time_is_compared_with_busy_time_without_user_mode() {
        let events = vec![
            cost(Event::Send, [190_000_000, 20_000_000], Some(7), [190, 10]),
            cost(Event::Local, [20_000_000, 0], Some(7), [20, 0]),
            cost(Event::Kernel, [90_000_000, 10_000_000], None, [90, 90]),
        ];
        let procstat = ProcStat { steal_ns: 5_000_000, ..ProcStat::default() };
        let cpu = CpuCost { cpu: 3, events, procstat, ..CpuCost::default() };
        let sum = KernelSum::new(&cpu, &profile(600, 660), 63.0, 1000, 1_000_000_000);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a}, not {b}: {sum:?}");
        assert_eq!(sum.cpu, 3);
        near(sum.timed_pct, 22.0);
        near(sum.sampled_pct, 11.0);
        near(sum.timed_by_samples_pct, 2.0 + 18.0 * 210.0 / 190.0);
        near(sum.observer_pct, 3.0);
        near(sum.user_pct, 30.0);
        near(sum.steal_pct, 0.5);
        near(sum.difference_points, 0.0);
        // The sum of two binomial variances: 11 % of the observer's 1,000 samples, and 600 of the profile's 1,260
        // samples, which are 63 % of the time.
        let variance: f64 = 11.0 * 89.0 / 1000.0 + 63.0 * 63.0 * (600.0 / 1260.0) * (660.0 / 1260.0) / 1260.0;
        near(sum.standard_error_points, variance.sqrt());
    }

    #[test]
    fn difference_over_1_point_is_allowed_within_three_standard_errors() {
        let judged = |points, error| {
            let sum = KernelSum::with_difference(points, error);
            (sum.meets_aim(), sum.is_within())
        };
        assert_eq!(judged(-1.0, 0.1), (true, true));
        assert_eq!(judged(1.4, 0.5), (false, true));
        assert_eq!(judged(-1.4, 0.4), (false, false));
    }

    #[test]
    fn cpu_without_samples_has_no_user_time() {
        let sum = KernelSum::new(&CpuCost::default(), &profile(0, 0), 0.0, 1000, 1_000_000_000);
        assert_eq!((sum.user_pct, sum.difference_points, sum.standard_error_points), (0.0, 0.0, 0.0));
    }
}
