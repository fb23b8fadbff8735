"""What a page shows, as JSON: functions of readers, plans and files, without a server. Imports core, report and `reading`."""
