# A report as two tables in Markdown: parts of events on all CPUs, and all time of process $pid.
.period_ns as $period
| def share: . / $period * 1000 | round / 10;
  "| event | % of a CPU | calls per second | its largest parts, % of a CPU |", "| --- | --- | --- | --- |",
  ( [.cpus[].events[]] | group_by(.event)[]
    | { event: .[0].event, ns: (map(.ns) | add), calls: (map(.calls) | add),
        parts: ([.[].parts[]] | group_by(.name) | map({ name: .[0].name, ns: (map(.ns) | add) }) | sort_by(-.ns)) }
    | select(.ns > $period / 1000)
    | "| `\(.event)` | \(.ns | share) | \(.calls * 1e9 / $period | round) | \(.parts[:7] | map("\(.name) \(.ns | share)") | join(", ")) |" ),
  "",
  ( .processes[] | select(.pid == $pid)
    | "All time of `\(.name)`: " + (.profile.parts | map("\(.name) \(.ns | share)") | join(", ")) + "." )
