//! The OpenMetrics text format, which every `/metrics` uses. It is encoded for each scrape.

use std::{collections::BTreeMap, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric, MetricEncoder, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};

/// Media type of the text that [`encode`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Encodes metric families for one scrape. Their names begin with `prefix`.
///
/// ```
/// use std::fmt;
/// use millrace_daemon::openmetrics::{Out, encode};
/// use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};
///
/// #[derive(Debug)]
/// struct Figures {
///     sessions: u64,
/// }
///
/// impl Collector for Figures {
///     fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
///         Out(encoder).gauge("sessions", "Open sessions", None, self.sessions)
///     }
/// }
///
/// let text = encode("millrace_relay", Figures { sessions: 3 })?;
/// assert!(text.contains("millrace_relay_sessions 3"));
/// # Ok::<(), fmt::Error>(())
/// ```
pub fn encode(prefix: &str, families: impl Collector) -> Result<String, fmt::Error> {
    encode_all(vec![(prefix, Box::new(families))])
}

/// Encodes several groups of metric families. Each group has its own prefix.
pub fn encode_all(groups: Vec<(&str, Box<dyn Collector>)>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    for (prefix, families) in groups {
        registry.sub_registry_with_prefix(prefix).register_collector(families);
    }
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

/// A writer of metric families.
pub struct Out<'a>(pub DescriptorEncoder<'a>);

impl Out<'_> {
    /// Writes a counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, unit: Option<Unit>, value: u64) -> fmt::Result {
        let metric = ConstCounter::new(value);
        metric.encode(self.0.encode_descriptor(name, help, unit.as_ref(), metric.metric_type())?)
    }

    /// Writes a gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, unit: Option<Unit>, value: u64) -> fmt::Result {
        let metric = ConstGauge::new(value);
        metric.encode(self.0.encode_descriptor(name, help, unit.as_ref(), metric.metric_type())?)
    }

    /// Writes counters without labels and units, from a table of name, help and value.
    pub fn plain_counters<const N: usize>(&mut self, rows: [(&str, &str, u64); N]) -> fmt::Result {
        rows.into_iter().try_for_each(|(name, help, value)| self.counter(name, help, None, value))
    }

    /// Writes gauges without labels and units, from a table of name, help and value.
    pub fn plain_gauges<const N: usize>(&mut self, rows: [(&str, &str, u64); N]) -> fmt::Result {
        rows.into_iter().try_for_each(|(name, help, value)| self.gauge(name, help, None, value))
    }

    /// Writes a floating-point gauge without labels.
    pub fn gauge_f64(&mut self, name: &str, help: &str, unit: Unit, value: f64) -> fmt::Result {
        let metric = ConstGauge::new(value);
        metric.encode(self.0.encode_descriptor(name, help, Some(&unit), metric.metric_type())?)
    }

    /// Writes one counter family, whose samples each have their own labels.
    pub fn counters<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        mut values: impl Iterator<Item = ([(&'l str, &'l str); N], u64)>,
    ) -> fmt::Result {
        self.labelled(name, help, MetricType::Counter, |family| {
            values.try_for_each(|(labels, value)| {
                ConstCounter::new(value).encode(family.encode_family(&labels)?)
            })
        })
    }

    /// Writes one gauge family, whose samples each have their own labels.
    pub fn gauges<'l, V: EncodeGaugeValue, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        mut values: impl Iterator<Item = ([(&'l str, &'l str); N], V)>,
    ) -> fmt::Result {
        self.labelled(name, help, MetricType::Gauge, |family| {
            values
                .try_for_each(|(labels, value)| ConstGauge::new(value).encode(family.encode_family(&labels)?))
        })
    }

    /// Writes one family of floating-point gauges, whose samples each have their own labels.
    pub fn gauges_f64<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        unit: &Unit,
        mut values: impl Iterator<Item = ([(&'l str, &'l str); N], f64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, Some(unit), MetricType::Gauge)?;
        values.try_for_each(|(labels, value)| ConstGauge::new(value).encode(family.encode_family(&labels)?))
    }

    /// Writes one counter family with a single label. The keys of the map are the label's values.
    pub fn counts(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        counts: &BTreeMap<String, u64>,
    ) -> fmt::Result {
        self.counters(name, help, counts.iter().map(|(value, count)| ([(label, value.as_str())], *count)))
    }

    /// Writes quantiles as a summary, unless there are no values.
    pub fn quantiles(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = f64>,
        quantiles: [f64; 3],
    ) -> fmt::Result {
        let mut values: Vec<_> = values.collect();
        values.sort_by(f64::total_cmp);
        self.labelled(name, help, MetricType::Gauge, |family| {
            quantiles.into_iter().try_for_each(|quantile| {
                let index = (quantile * values.len().saturating_sub(1) as f64).round() as usize;
                let Some(value) = values.get(index) else { return Ok(()) };
                ConstGauge::new(*value).encode(family.encode_family(&[("quantile", quantile.to_string())])?)
            })
        })
    }

    /// Writes a counter family whose samples have the label `outcome`, with the map's keys as values. Writes nothing
    /// without a map.
    pub fn by_outcome(
        &mut self,
        name: &str,
        help: &str,
        counts: &Option<BTreeMap<String, u64>>,
    ) -> fmt::Result {
        let Some(counts) = counts else { return Ok(()) };
        self.counts(name, help, "outcome", counts)
    }

    /// Writes one metric family with labels.
    pub fn labelled(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        values: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        values(&mut self.0.encode_descriptor(name, help, None, kind)?)
    }
}
