"""One run, or a comparison of several, as one self-contained HTML file, readable without scripts.

run             records and state of one run
rank_failure    failure of a start without a supervisor
curve           one curve: points, smoothing, times
series          metrics.jsonl as curves
chart_types     chart, series, colours
charts          Vega-Lite specifications
chart_render    specification → SVG picture
run_charts      charts of one run
headline        headline figures of one run
timeline        timeline of one run
plan_sections   sections from the plan: configuration, data, machine
sections        sections on what happened: failure, checks, events, samples
run_page        page of one run
compare_page    page of several runs
page            frame of a page
html            HTML with escaped text
options         command line
"""
