"""What each op costs: seconds and workspace, by roofline or by measurement. Knows no torch."""
