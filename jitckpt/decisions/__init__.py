"""Pure decisions: functions of plain data, which know no process, no device and no clock."""
