-- A small railway: written for this project.
CREATE TABLE station (station_id INTEGER PRIMARY KEY, name TEXT, county TEXT, platforms INTEGER, opened INTEGER);
CREATE TABLE train (train_id INTEGER PRIMARY KEY, name TEXT, operator TEXT, top_speed INTEGER, seats INTEGER);
CREATE TABLE stop (train_id INTEGER, station_id INTEGER, arrival TEXT, minutes_stopped INTEGER,
  PRIMARY KEY (train_id, station_id),
  FOREIGN KEY (train_id) REFERENCES train(train_id), FOREIGN KEY (station_id) REFERENCES station(station_id));
INSERT INTO station VALUES
  (1,'Ashcombe','North',4,1871),(2,'Briar Cross','North',2,1890),(3,'Coldwater','East',6,1866),
  (4,'Dunmere','East',2,1902),(5,'Elmsted','South',3,1890),(6,'Fenwick Halt','South',1,1934),
  (7,'Gorsefield','West',2,NULL);
INSERT INTO train VALUES
  (1,'Northern Star','Blue Line',160,320),(2,'Coastal Runner','Blue Line',120,210),
  (3,'Moor Express','Valley Rail',160,280),(4,'Night Owl','Valley Rail',100,150),
  (5,'Harvest Flyer','Green Coaches',200,410),(6,'Milk Train','Green Coaches',80,NULL);
INSERT INTO stop VALUES
  (1,1,'08:05',3),(1,3,'08:50',5),(1,5,'09:40',2),(2,3,'07:15',4),(2,4,'07:55',2),(2,6,'08:30',1),
  (3,1,'10:10',2),(3,2,'10:35',2),(3,3,'11:20',6),(4,2,'23:05',8),(4,5,'23:59',10),
  (5,3,'12:00',3),(5,5,'12:45',3),(5,1,'13:30',4);
